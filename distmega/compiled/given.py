"""What a compiled program may be given: this rank's inputs, weights and states by name, and what
each must be.

Comes in: a program and the host program of this rank. Goes out: ProgramError for a tensor that is
none of them, does not fit, or shares memory that it must not; RequestError for ids that a table has
no row for. Made by program.py; used by bindings.py, which keeps tensors, parts.py, which cuts them,
and running.py.
"""

import math
from collections.abc import Mapping
from typing import NoReturn

from torch import Tensor

from distmega.arguments import shown
from distmega.errors import ProgramError
from distmega.hostir.ir.nodes import HostProgram
from distmega.hostir.library.torch_types import fits, misfit
from distmega.program import types as program
from distmega.program.ops.lookups import bounded_inputs, require_ids


class GivenTensors:
    """The tensors that a program is given on one rank. buffers: by name, as this rank has them;
    states, inputs: names of those.
    """

    def __init__(self, whole: program.Program, host: HostProgram) -> None:
        self.buffers: Mapping[str, program.Tensor] = {
            buffer.name: buffer for buffer in host.buffers if buffer.role != "temp"
        }
        self.states = self._with_role("state")
        self.inputs = self._with_role("input")
        self._bounded = bounded_inputs(whole)

    def _with_role(self, role: program.Role) -> frozenset[str]:
        return frozenset(name for name, buffer in self.buffers.items() if buffer.role == role)

    def check(self, name: str, found: Tensor) -> None:
        """This rank's part of a tensor, as a call or `bind` is given it."""
        buffer = self.buffers.get(name) or self.refuse_name(name)
        if not fits(found, buffer):
            raise misfit(found, buffer)
        self.check_ids(name, found)

    def check_ids(self, name: str, found: Tensor) -> None:
        """RequestError for ids on a CPU that a table has no row for."""
        if name in self._bounded:
            require_ids(found, self._bounded[name], name)

    def check_apart(self, tensors: Mapping[str, Tensor]) -> None:
        """ProgramError for states of which an update would change other states, weights, or more of
        themselves.
        """
        kept = [name for name in tensors if self.buffers[name].role in ("state", "weight")]
        ends = {"state": (0, ""), "weight": (0, "")}  # how far those before reach, and which does
        for name in sorted(kept, key=lambda n: tensors[n].data_ptr()):
            x, role = tensors[name], self.buffers[name].role
            if not x.numel():
                continue
            is_state = role == "state"
            repeats = any(n > 1 and not step for n, step in zip(x.shape, x.stride(), strict=True))
            stop, last = max(ends.values()) if is_state else ends["state"]
            if is_state and repeats:
                raise _shared_memory(name, name)
            if x.data_ptr() < stop:
                raise _shared_memory(*((name, last) if is_state else (last, name)))
            ends[role] = max(ends[role], (x.data_ptr() + _filled_bytes(x), name))

    def refuse_name(self, name: str) -> NoReturn:
        raise ProgramError(
            f"a value for {shown(name)}",
            expected=f"one of {sorted(self.buffers)}",
            remedy="give inputs, weights and states of the program by name",
        )


def _filled_bytes(x: Tensor) -> int:
    """Bytes from its first element on that are all of a tensor, in whatever order: those between
    elements that lie apart may be another's.
    """
    pairs = [*zip(x.shape, x.stride(), strict=True)]
    num_to_last = 1 + sum((extent - 1) * step for extent, step in pairs)
    has_gaps = num_to_last != math.prod(extent for extent, step in pairs if step)
    return x.element_size() * (1 if has_gaps else num_to_last)


def _shared_memory(state: str, other: str) -> ProgramError:
    return ProgramError(
        f"state {state!r} in memory that it shares with {other!r}",
        expected="memory of its own for every state",
        remedy="give each a tensor of its own",
    )
