"""A call of a compiled program node by node, and what runs the nodes.

Comes in: the host program with its kernel, if it has one; the inputs of a call. Goes out: outputs
in memory that neither later calls nor the caller's inputs share. Next: hostir/run/evaluator.py.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from distmega.compiled.bindings import Bindings
from distmega.compiled.given import GivenTensors
from distmega.compiled.guard import CallGuard
from distmega.compiled.lowering import RankProgram
from distmega.hostir.comm.communicator import Communicator
from distmega.hostir.comm.nccl import NcclCommunicator
from distmega.hostir.ir.nodes import HostProgram
from distmega.hostir.ir.uses import storage_of, view_sources
from distmega.hostir.run.evaluator import Evaluator, KernelRunner
from distmega.kernels.gemm.host import PeerMatmuls
from distmega.kernels.library.device_ops import KernelOps
from distmega.kernels.whole import WholeKernel
from distmega.superopt.rules import RewriteRule


def make_evaluator(
    host: HostProgram,
    comm: Communicator,
    device: torch.device,
    rules: Sequence[RewriteRule],
    kernel: WholeKernel | None,
    copied_states: Collection[str],
) -> Evaluator:
    """What runs a host program, with the kernel if there is one. copied_states: those that stay
    with the caller, whom the kernel copies them from and back to.
    """
    on_gpu, kernels = device.type == "cuda", dict[str, KernelRunner]()
    if kernel:
        kernels[host.segments[0].name] = kernel.with_copied(copied_states)
    ops = None
    if on_gpu or rules:
        ops = KernelOps(masked=on_gpu, rules=lambda: rules, device=device)
    matmuls = PeerMatmuls(comm) if isinstance(comm, NcclCommunicator) else None
    return Evaluator(host, comm, kernels, str(device), ops=ops, matmuls=matmuls)


class NodeByNode:
    """Runs of a program node by node."""

    def __init__(
        self,
        lowered: RankProgram,
        given: GivenTensors,
        bindings: Bindings,
        guard: CallGuard,
        device: torch.device,
    ) -> None:
        self._lowered, self._given, self._bindings = lowered, given, bindings
        self._guard, self._device = guard, device

    @cached_property
    def _shown(self) -> Mapping[str, list[str]]:
        """Inputs that outputs are, or are views of, and these outputs."""
        found, sources = defaultdict[str, list[str]](list), view_sources(self._lowered.host.body)
        for out in self._lowered.host.outputs:
            if (name := storage_of(out, sources)) in self._given.inputs:
                found[name].append(out)
        return found

    def run(self, evaluator: Evaluator, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Outputs by name. inputs: those that are copied; all else is bound."""
        bound, copied = self._bindings.tensors, self._bindings.copied
        if self._device.type == "cuda" and self._lowered.graph_ops:
            # A rule's kernel may read weights before the kernels ahead of it have ended. These are
            # this program's, which write none, once one that starts in turn lies in between.
            torch.zeros(1, device=self._device)
        for name in inputs.keys() & bound.keys():
            bound[name].copy_(inputs[name].detach())
        updated = {bound[name].untyped_storage().data_ptr() for name in self._given.states}
        inputs = {
            name: x.clone() if x.untyped_storage().data_ptr() in updated else x.resolve_neg()
            for name, x in inputs.items()
        }
        self._guard.began = True
        outputs = evaluator.run({**inputs, **bound})
        for name in self._shown.keys() & copied & bound.keys():
            outputs |= {out: outputs[out].clone() for out in self._shown[name]}
        given = {x.untyped_storage().data_ptr() for x in inputs.values()}
        outputs |= {
            name: x.clone()
            for name, x in outputs.items()
            if x.untyped_storage().data_ptr() in given
        }
        return outputs
