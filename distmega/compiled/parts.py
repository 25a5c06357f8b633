"""This rank's parts of whole tensors, as the plan divides them.

Comes in: a whole input, weight or state. Goes out: the part that this rank gives its program, as
sharding/layout/allocation.py says where it lies. Used by program.py.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from distmega.arguments import require_switch, shown
from distmega.compiled.given import GivenTensors
from distmega.errors import ProgramError
from distmega.hostir.library.torch_types import empty_tensor, fits, misfit, require_real_tensors
from distmega.program import types as program
from distmega.sharding.layout.allocation import AllocationDomain
from distmega.sharding.planner import Plan


class Parts:
    """Cuts this rank's parts; `slices` and `part` are those of CompiledProgram."""

    def __init__(
        self,
        plan: Plan,
        allocations: Mapping[str, AllocationDomain],
        given: GivenTensors,
        rank: int,
        device: torch.device,
    ) -> None:
        self._program, self._wholes = plan.program.name, plan.program.tensor_map()
        self._domains, self._at = allocations, plan.mesh.coordinate(rank)
        self._given, self._rank, self._device = given, rank, device

    def slices(self, name: str) -> tuple[slice, ...]:
        """Where the part of a tensor lies in the whole, a slice a dim."""
        if not isinstance(name, str) or name not in self._domains:
            raise ProgramError(
                f"tensor {shown(name)}",
                expected=f"one of program {self._program!r}: {sorted(self._wholes)}",
                remedy="correct the name",
            )
        return self._domains[name].local_slices(self._at)

    def part(self, name: str, whole: Tensor, *, copy: bool) -> Tensor:
        """The part, with zeros behind it where ranks hold unequal parts."""
        self._check_whole(name, whole)
        require_switch("copy", copy, error=ProgramError)
        found = whole.detach()[self.slices(name)]
        buffer = self._given.buffers[name]
        if not copy:
            self._check_view(name, found, buffer)
            return found
        part = empty_tensor(buffer, self._device)
        if found.shape != buffer.shape:
            part.zero_()
        part[tuple(slice(extent) for extent in found.shape)].copy_(found)
        return part

    def _check_whole(self, name: str, whole: Tensor) -> None:
        require_real_tensors()
        if not isinstance(name, str) or name not in self._given.buffers:
            self._given.refuse_name(name)
        tensor = self._wholes[name]
        if not fits(whole, tensor):
            raise misfit(whole, tensor, ", the whole tensor", "correct its shape, or convert it")
        self._given.check_ids(name, whole)

    def _check_view(self, name: str, found: Tensor, buffer: program.Tensor) -> None:
        if found.device != self._device:
            problem = f"is on {found.device}, not on {self._device}"
        elif found.shape != buffer.shape:
            problem = f"is {list(found.shape)}, and has zeros behind it up to {list(buffer.shape)}"
        elif found.is_neg():
            problem = "lies there as its negative"
        elif not found.is_contiguous():
            problem = f"isn't contiguous in the whole: strides {list(found.stride())}"
        else:
            return
        raise ProgramError(
            f"the part of {name!r} on rank {self._rank} {problem}",
            expected="a part that can be a view of the whole tensor",
            remedy="leave out copy=False",
        )
