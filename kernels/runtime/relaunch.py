"""Launches of one kernel with the same constants again and again, with little work on the host.

In: a kernel, its grid, constants and options. Out: a callable that takes the other arguments. To
find the compiled kernel Triton looks at each argument, which takes 0.2 to 0.3 ms for the steps'
kernel; only the first launch does so. A kernel that takes long to compile can be prepared while the
host does something else. Next on the walk: hopper/one_row/kernel.py.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from threading import Thread
from types import SimpleNamespace

import torch
import triton
from triton.runtime import driver

from distmega.kernels.runtime import warm_up
from distmega.kernels.runtime.ahead import launches_nothing
from distmega.kernels.runtime.switching import short_turns

_NO_METADATA = SimpleNamespace(
    global_scratch_size=0,
    global_scratch_align=1,
    profile_scratch_size=0,
    profile_scratch_align=1,
    launch_cooperative_grid=False,
    launch_pdl=False,
)
"""What a launcher keeps of a compiled kernel and its C code does not depend on."""

_log = logging.getLogger(__name__)


class Launcher:
    """Arguments of later calls must be of the kind, and as aligned, as those of the first."""

    def __init__(
        self,
        kernel: triton.JITFunction,
        num_programs: int,
        constants: Mapping[str, object],
        **options: object,
    ) -> None:
        """constants: the kernel's last parameters, in their order. options: as in a launch."""
        assert kernel.arg_names[-len(constants) :] == list(constants), "constants come last"
        self._kernel, self._num_programs = kernel, num_programs
        self._constants, self._options = dict(constants), options
        self._run: Callable[..., object] | None = None
        self._preparing: Thread | None = None

    def prepare(self, *arguments: object) -> None:
        """Compiles and loads in a thread of its own what launches of such arguments need; nothing
        runs. The first launch waits for it, and so does the end of the process, since a thread that
        Python cuts off in a compiler's C++ would abort it.
        """
        device = torch.cuda.current_device() if torch.cuda.is_available() else None

        @short_turns()
        def compile_kernel() -> None:
            if device is not None:
                torch.cuda.set_device(device)
            warm_up.finish()
            given = {**self._constants, **self._options}
            make_launcher_beside(self._kernel, arguments, given)
            compiled = self._kernel.warmup(*arguments, grid=(self._num_programs,), **given)
            compiled.run  # noqa: B018  compiles its launcher and loads it

        self._preparing = Thread(target=compile_kernel)
        self._preparing.start()

    def await_prepared(self) -> None:
        """Returns when what `prepare` began has ended."""
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    def __call__(self, *arguments: object) -> None:
        """Launches on the current stream of the current device; the first call compiles. Within
        launching_nothing one that has run before does nothing.
        """
        self.await_prepared()
        if launches_nothing():
            if self._run is None:
                given = {**self._constants, **self._options}
                self._kernel.warmup(*arguments, grid=(self._num_programs,), **given)
            return
        if self._run is not None:
            self._run(*arguments, *self._constants.values())
            return
        launch = self._kernel[(self._num_programs,)]
        compiled = launch(*arguments, **self._constants, **self._options)
        self._run = compiled[(self._num_programs, 1, 1)]


def make_launcher_beside(
    kernel: triton.JITFunction, arguments: Sequence[object], given: Mapping[str, object]
) -> Thread | None:
    """Has the C compiler make a kernel's launcher, which depends on its parameters alone, in a
    thread beside the compilation of the kernel. Triton, which would make it afterwards, finds it in
    its cache. None, and Triton makes it, where this can't be asked of Triton before it compiles.

    given: constants and options, as in a launch. The caller compiles in its own thread.
    """
    try:
        launcher_of, source = driver.active.launcher_cls, _source_of(kernel, arguments, given)
    except Exception as error:  # another Triton: what it does not have it makes itself
        _log.debug("no launcher beside its kernel: %s", error)
        return None

    def make() -> None:
        try:
            launcher_of(source, _NO_METADATA)
        except Exception as error:  # who compiles meets it again, and reports it
            _log.debug("no launcher beside its kernel: %s", error)

    thread = Thread(target=make, name="launcher")
    thread.start()
    return thread


def _source_of(
    kernel: triton.JITFunction, arguments: Sequence[object], given: Mapping[str, object]
) -> object:
    """What Triton compiles in a launch of these arguments, as it puts it together."""
    _, _, _, backend, bind = kernel.device_caches[driver.active.get_current_device()]
    known = {
        **given,
        "debug": given.get("debug", kernel.debug) or triton.knobs.runtime.debug,
        "instrumentation_mode": triton.knobs.compilation.instrumentation_mode,
    }
    bound, specialization, options = bind(*arguments, **known)
    packed = kernel._pack_args(backend, known, bound, specialization, options)
    _, signature, constants, attributes = packed
    return kernel.ASTSource(kernel, signature, constants, attributes)
