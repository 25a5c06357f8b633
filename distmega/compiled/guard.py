"""When a compiled program may run: in the process that compiled it, while its states are good, and
until it is closed. Its GPU is the current one meanwhile. Used by program.py and running.py.
"""

import os
from weakref import WeakSet

import torch

from distmega.engine.ranks.own_process import require_process
from distmega.errors import DistmegaError, HangError, ProgramError, RankFailure
from distmega.hostir.library.torch_types import require_real_tensors


class CallGuard:
    """Around what runs a program: refuses it in a fork of the process that compiled it, and while
    its states are void, which a fault makes them, and whatever ends a run that has begun, since
    some may be updated by then. Within it the program's GPU is the current one. began: whether the
    call has; fault: what made them void, empty while they are good, and not once the program is
    closed; gpu: its number.
    """

    __slots__ = (
        "__weakref__", "_has_states", "_made", "_process", "_program", "began", "fault", "gpu",
        "is_closed",
    )  # fmt: skip

    def __init__(self, program: str, has_states: bool, gpu: int | None) -> None:
        """gpu: None on a CPU."""
        self._program, self._has_states, self.fault = program, has_states, ""
        self.gpu = gpu
        self._made: torch.cuda.device | None = None
        self._process, self.began, self.is_closed = os.getpid(), False, False
        _guards.add(self)

    def close(self) -> None:
        """From now on nothing runs the program."""
        self.fault, self.is_closed = "its close()", True

    def __enter__(self) -> None:
        self.began = False
        if self.fault:
            self.require_process()
            raise ProgramError(
                f"states of program {self._program!r} that are void since {self.fault}",
                expected="states bound again after a fault, on all ranks",
                remedy="fill them anew and bind() them all",
            )
        # as made_current does, at one call where it is the current one already
        if self.gpu is not None and self.gpu != torch.cuda.current_device():
            self._made = torch.cuda.device(self.gpu)
            self._made.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._made is not None:
            self._made.__exit__(kind, error, traceback)
            self._made = None
        broken = isinstance(error, HangError | RankFailure) or (self.began and error is not None)
        if self._has_states and broken:
            what = error.found if isinstance(error, DistmegaError) else str(error)
            self.fault = f"{type(error).__name__}: {what}"
        if error is not None:
            require_real_tensors()  # tells more than what torch says of fake ones

    def require_process(self) -> None:
        """RequestError in a fork of the process that compiled the program, ProgramError once it is
        closed.
        """
        require_process(self._process, f"program {self._program!r}")
        if self.is_closed:
            raise ProgramError(
                f"a call of program {self._program!r} after its close()",
                expected="calls before",
                remedy="compile it again, on all ranks",
            )


_guards: "WeakSet[CallGuard]" = WeakSet()


def _refuse_forks() -> None:
    """In a new process: so that calls need not ask in which one they are."""
    for guard in _guards:
        guard.fault = "a fork"


os.register_at_fork(after_in_child=_refuse_forks)
