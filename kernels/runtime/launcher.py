"""Launches of one kernel with the same constants again and again, with little work on the host.

In: a kernel, its grid, constants and options. Out: a callable that takes the other arguments. To
find the compiled kernel Triton looks at each argument, which takes 0.2 to 0.3 ms for the decode
kernel; only the first launch does so. Next on the walk: hopper/kernel.py.
"""

from collections.abc import Callable, Mapping

import triton


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

    def __call__(self, *arguments: object) -> None:
        """Launches on the current stream of the current device; the first call compiles."""
        if self._run is not None:
            self._run(*arguments, *self._constants.values())
            return
        launch = self._kernel[(self._num_programs,)]
        compiled = launch(*arguments, **self._constants, **self._options)
        self._run = compiled[(self._num_programs, 1, 1)]
