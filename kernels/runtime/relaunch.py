"""Launches of one kernel with the same constants again and again, with little work on the host.

In: a kernel, its grid, constants and options. Out: a callable that takes the other arguments. To
find the compiled kernel Triton looks at each argument, which takes 0.2 to 0.3 ms for the steps'
kernel; only the first launch does so. A kernel that takes long to compile can be prepared while the
host does something else. Next on the walk: hopper/one_row/kernel.py.
"""

from collections.abc import Callable, Mapping
from threading import Thread

import torch
import triton

from distmega.kernels.runtime import warm_up
from distmega.kernels.runtime.ahead import launch, launches_nothing, parsing_in_turn
from distmega.kernels.runtime.extension_modules import make_launcher_beside
from distmega.kernels.runtime.switching import short_turns


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
            with parsing_in_turn():
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
                launch(self._kernel, (self._num_programs,), *arguments, **given)
            return
        if self._run is not None:
            self._run(*arguments, *self._constants.values())
            return
        first = self._kernel[(self._num_programs,)]
        compiled = first(*arguments, **self._constants, **self._options)
        self._run = compiled[(self._num_programs, 1, 1)]
