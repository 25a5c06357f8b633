"""Triton's launchers, extension modules of one name: made beside their kernels, and loaded so that
none becomes another.

In: a kernel, and what it is to be launched with. Out: its launcher, in Triton's cache. CPython
gives an extension module that it loads a second time out of the module that has its name in
sys.modules, whatever file that came from, and overwrites what is in it. So where a kernel's
launcher was loaded before, loading it again put its `launch` into the module that another thread
had loaded last and not looked at yet, and that thread's kernel was then launched with another
kernel's arguments. Used by ahead.py and relaunch.py.
"""

import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, SimpleNamespace

import triton
from triton.runtime import build, driver

_log = logging.getLogger(__name__)
_LOADING = threading.Lock()

Load = Callable[[str, str], ModuleType]


def loading_apart(load: Load) -> Load:
    """As `load`, a function of a module's name and file, but one at a time, and no module stays in
    sys.modules.
    """

    def load_alone(name: str, path: str) -> ModuleType:
        with _LOADING:
            before = sys.modules.pop(name, None)
            try:
                return load(name, path)
            finally:
                sys.modules.pop(name, None)
                if before is not None:
                    sys.modules[name] = before

    return load_alone


def _load_launchers_apart() -> None:
    """From now on, in this process, whoever uses Triton."""
    load = getattr(build, "_load_module_from_path", None)
    if load is not None:  # a later Triton may have launchers of another kind
        build._load_module_from_path = loading_apart(load)


_load_launchers_apart()


def make_launcher_beside(
    kernel: triton.JITFunction, arguments: Sequence[object], given: Mapping[str, object]
) -> threading.Thread | None:
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
            launcher_of(source, _metadata_of(source))
        except Exception as error:  # who compiles meets it again, and reports it
            _log.debug("no launcher beside its kernel: %s", error)

    thread = threading.Thread(target=make, name="launcher")
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


def _metadata_of(source: object) -> SimpleNamespace:
    """What a launcher takes of a compiled kernel. Its C code depends on one thing of that: whether
    TMA takes descriptors, as on a Hopper GPU.
    """
    types = source.signature.values()  # type: ignore[attr-defined]
    descriptors = [x for x in types if isinstance(x, str) and x.startswith("tensordesc")]
    return SimpleNamespace(
        global_scratch_size=0,
        global_scratch_align=1,
        profile_scratch_size=0,
        profile_scratch_align=1,
        launch_cooperative_grid=False,
        launch_pdl=False,
        tensordesc_meta=[{}] * len(descriptors),
    )
