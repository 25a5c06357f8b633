"""A planned program, ready to run on one rank.

Comes in: a Plan and the rank's place in the job. Goes out: a CompiledProgram, called with this
rank's tensors. Ops are library ops, on a GPU with the kernels for pointwise ops, norms, softmax and
matmuls with a collective beside them. Next: hostir/lower/lower.py.
"""

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor

from distmega.engine.communicators import open_communicator
from distmega.engine.ranks import RankContext
from distmega.errors import ProgramError
from distmega.hostir.comm.communicator import Communicator
from distmega.hostir.comm.nccl import NcclCommunicator
from distmega.hostir.ir.nodes import HostProgram
from distmega.hostir.library.torch_types import check_mapping, describe, empty_tensor, fits
from distmega.hostir.lower.lower import lower_program
from distmega.hostir.passes.passes import run_passes
from distmega.hostir.run.evaluator import Evaluator
from distmega.kernels.device_ops import KernelOps
from distmega.kernels.gemm.host import PeerMatmuls
from distmega.program import types as program
from distmega.sharding.localize import localize
from distmega.sharding.planner import Plan


class CompiledProgram:
    """A plan on one rank; all ranks of its mesh must make the same calls in the same order.

    host: what runs, as hostir.print_host shows it.
    """

    def __init__(self, plan: Plan, comm: Communicator, device: str = "cpu") -> None:
        """comm: of the plan's mesh. device: where this rank's tensors are, "cpu" or "cuda:i"."""
        self.plan, self.comm, self.device = plan, comm, torch.device(device)
        on_gpu = self.device.type == "cuda"
        local = localize(plan)
        peers = isinstance(comm, NcclCommunicator)
        self.host: HostProgram = run_passes(
            lower_program(local, megakernel=False, peer_memory=peers, fuse=on_gpu)
        )
        self._domains, self._at = local.allocations, plan.mesh.coordinate(comm.rank)
        self._evaluator = Evaluator(
            self.host,
            comm,
            {},
            device,
            ops=KernelOps() if on_gpu else None,
            matmuls=PeerMatmuls(comm) if isinstance(comm, NcclCommunicator) else None,
        )

    def __call__(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Outputs by name, this rank's part of each. parts: as `parts` gives them, by name.

        Raises ProgramError for a tensor that is missing or does not fit, RankFailure if a peer
        fails.
        """
        return self._evaluator.run(parts)

    def slices(self, name: str) -> tuple[slice, ...]:
        """Where this rank's part of a tensor lies in the whole, a slice a dim."""
        if name not in self._domains:
            raise ProgramError(
                f"tensor {name!r}",
                expected=f"one of program {self.plan.program.name!r}: {sorted(self._wholes)}",
                remedy="correct the name",
            )
        return self._domains[name].local_slices(self._at)

    def part(self, name: str, whole: Tensor, *, copy: bool = True) -> Tensor:
        """This rank's part of a whole input, weight or state, contiguous and on its device; with
        zeros behind it where ranks hold unequal parts.

        The part has memory of its own, so that a step which updates a state leaves `whole` as it
        is. copy=False: the part is a view of `whole`, which sees the updates of a state.
        ProgramError where no view can be that part: `whole` is on another device, the part isn't
        contiguous in it, or has zeros behind it.
        """
        self._check_whole(name, whole)
        found = whole.detach()[self.slices(name)]
        buffer = self._given[name]
        if not copy:
            self._check_view(name, found, buffer)
            return found
        part = empty_tensor(buffer, self.device)
        if found.shape != buffer.shape:
            part.zero_()
        part[tuple(slice(extent) for extent in found.shape)].copy_(found)
        return part

    def parts(self, wholes: Mapping[str, Tensor], *, copy: bool = True) -> dict[str, Tensor]:
        """`part` of each, by name."""
        check_mapping(wholes)
        return {name: self.part(name, whole, copy=copy) for name, whole in wholes.items()}

    @cached_property
    def _wholes(self) -> Mapping[str, program.Tensor]:
        return self.plan.program.tensor_map()

    @cached_property
    def _given(self) -> Mapping[str, program.Tensor]:
        return {buffer.name: buffer for buffer in self.host.buffers if buffer.role != "temp"}

    def _check_whole(self, name: str, whole: Tensor) -> None:
        if name not in self._given:
            raise ProgramError(
                f"a value for {name!r}",
                expected=f"one of {sorted(self._given)}",
                remedy="give inputs, weights and states of the program by name",
            )
        tensor = self._wholes[name]
        if not isinstance(whole, Tensor) or not fits(whole, tensor):
            raise ProgramError(
                f"{describe(whole)} for {tensor.role} {name!r}",
                expected=f"{tensor.dtype}{list(tensor.shape)}, the whole tensor",
                remedy="correct its shape, or convert it",
            )

    def _check_view(self, name: str, found: Tensor, buffer: program.Tensor) -> None:
        if found.device != self.device:
            problem = f"is on {found.device}, not on {self.device}"
        elif found.shape != buffer.shape:
            problem = f"is {list(found.shape)}, and has zeros behind it up to {list(buffer.shape)}"
        elif not found.is_contiguous():
            problem = f"isn't contiguous in the whole: strides {list(found.stride())}"
        else:
            return
        raise ProgramError(
            f"the part of {name!r} on rank {self.comm.rank} {problem}",
            expected="a part that can be a view of the whole tensor",
            remedy="leave out copy=False",
        )


def compile_plan(plan: Plan, context: RankContext) -> CompiledProgram:
    """The plan on this rank of a job, which must have as many ranks as the plan's mesh.

    All ranks call it, at the same point. MeshError where the job has other ranks.
    """
    return CompiledProgram(plan, open_communicator(context, plan.mesh), context.device)
