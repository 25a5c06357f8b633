"""Runs a compiled megakernel on the CPU, as one rank of its team.

In: a Megakernel, this rank's weight and state arenas, and its peers. Out: a KernelRunner for
hostir/run/evaluator.py: `launch` copies inputs in, interprets the queues, copies outputs out;
weights and states are used where they lie.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from distmega.errors import LaunchError
from distmega.hostir.comm.communicator import Communicator
from distmega.hostir.comm.plain import Plain
from distmega.hostir.ir.nodes import segment_args
from distmega.hostir.library.torch_types import dtype_name
from distmega.kernels.cpu.interpreter import RankInterpreter
from distmega.kernels.cpu.peer import Gather, Peers, PeerSizes, local_peers, share_peers
from distmega.kernels.isa.memory import RankMemory
from distmega.kernels.megakernel import Megakernel
from distmega.kernels.runtime.arena import PEER_BUFFERS, Space, tensor_space
from distmega.kernels.runtime.memory import allocate_arena, operand_view

POISON = 0xFF
"""Byte that makes every float a NaN and every index negative."""


def peer_sizes(kernel: Megakernel) -> PeerSizes:
    """What peers write on one rank that runs this kernel."""
    num_lanes = len(kernel.team(kernel.mesh.ranks[0]))
    return PeerSizes(
        arena_bytes=kernel.peer_bytes, num_events=kernel.encoded.num_events, num_lanes=num_lanes
    )


def open_peers(kernel: Megakernel, rank: int, gather: Gather) -> Peers:
    """Peer memory of a rank that runs in a process of its own; collective over the kernel's team.

    gather: of one value from each rank of `kernel.team(rank)`. A kernel without a team needs none.
    """
    team, sizes = kernel.team(rank), peer_sizes(kernel)
    return share_peers(rank, team, sizes, gather) if len(team) > 1 else local_peers(team, sizes)


def open_cpu(
    kernel: Megakernel,
    comm: Communicator,
    *,
    weights_arena: Tensor,
    state_arena: Tensor,
    timeout_s: float,
    seed: int | None = None,
) -> "CpuMegakernel":
    """The kernel on this rank of a mesh of processes, which open it together. Arguments as of
    CpuMegakernel.
    """

    def gather(value: Plain) -> Sequence[object]:
        return gather_along(comm, kernel.team_axes, value)

    return CpuMegakernel(
        kernel,
        rank=comm.rank,
        weights_arena=weights_arena,
        state_arena=state_arena,
        peers=open_peers(kernel, comm.rank, gather),
        seed=seed,
        timeout_s=timeout_s,
    )


def gather_along(comm: Communicator, axes: Sequence[str], value: Plain) -> Sequence[object]:
    """The values of all ranks that differ from this one along these mesh axes, in mesh order."""
    found: list[Plain] = [value]
    for axis in reversed(axes):
        found = [one for part in comm.all_gather_object(found, axis) for one in part]
    return found


class CpuMegakernel:
    """A megakernel bound to the memory of one rank."""

    replays = False

    def __init__(
        self,
        kernel: Megakernel,
        *,
        rank: int,
        weights_arena: Tensor,
        state_arena: Tensor,
        peers: Peers,
        seed: int | None = None,
        timeout_s: float = 60.0,
        poison: bool = False,
    ) -> None:
        """weights_arena, state_arena: uint8, as allocate_arena makes them for kernel.layout.weights
        and .states.

        seed: interleave SMs at random; None runs them in turn. timeout_s: longest wait for peers
        before a HangError. poison: fill activations with NaN before each launch, so that reading
        what was never written shows.
        """
        self.kernel = kernel
        self._timeout_s = timeout_s
        self._poison = poison
        self._activations = allocate_arena(kernel.layout.activations)
        arenas = (weights_arena, state_arena, self._activations)
        self._check_arenas(weights_arena, state_arena)
        teams = [kernel.mesh.team(name, rank) for name, _ in kernel.mesh.axes]
        memories = [
            RankMemory(
                arenas=(*arenas, self._peer_arena(peers, rank, copy)),
                teams=tuple(
                    tuple(self._peer_arena(peers, r, copy) for r in team if r in peers.arenas)
                    for team in teams
                ),
                coordinate=tuple(kernel.mesh.coordinate(rank).values()),
                constants=kernel.encoded.constants,
            )
            for copy in range(PEER_BUFFERS)
        ]
        self.interpreter = RankInterpreter(
            kernel.encoded, rank=rank, teams=teams, memories=memories, peers=peers, seed=seed
        )
        operands = kernel.layout.operands
        args = [t for t in segment_args(kernel.segment) if tensor_space(t) is not Space.PEER]
        views = {t.name: operand_view(arenas, operands[t.name]) for t in args}
        self._inputs = {t.name: views[t.name] for t in args if t.role == "input"}
        self._outputs = {t.name: views[t.name] for t in args if t.role == "temp"}
        self._shared = {t.name: views[t.name] for t in args if t.role in ("weight", "state")}

    def launch(self, tensors: Mapping[str, Tensor]) -> None:
        """Runs the kernel once. `tensors`: segment_args of the segment by name; outputs are
        written.

        Raises LaunchError for tensors that do not fit, and HangError if a peer does not do its
        part.
        """
        self.load(tensors)
        self.interpreter.start()
        self.interpreter.run(self._timeout_s)
        self.store(tensors)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """What a launch begins with: checks all tensors, and copies the inputs in."""
        for name, view in self._shared.items():
            given = tensors[name]
            if given.data_ptr() != view.data_ptr() or given.stride() != view.stride():
                raise LaunchError(
                    f"{name!r} lies outside the arenas of kernel {self.kernel.name!r}",
                    expected="the view that arena_views gives",
                    remedy="load weights and states into the views of the arenas",
                )
        for name, view in (*self._inputs.items(), *self._outputs.items()):
            given = tensors[name]
            if given.shape != view.shape or given.dtype != view.dtype:
                raise LaunchError(
                    f"{name!r} is {dtype_name(given.dtype)}{list(given.shape)}",
                    expected=f"{dtype_name(view.dtype)}{list(view.shape)}",
                    remedy="pass tensors as the segment declares them",
                )
        if self._poison:
            self._activations.fill_(POISON)
        for name, view in self._inputs.items():
            view.copy_(tensors[name])

    def store(self, tensors: Mapping[str, Tensor]) -> None:
        """What a launch ends with: copies the outputs out."""
        for name, view in self._outputs.items():
            tensors[name].copy_(view)

    def _peer_arena(self, peers: Peers, rank: int, copy: int) -> Tensor:
        """One copy of a rank's peer arena."""
        num_bytes = self.kernel.layout.peers.num_bytes
        return peers.arenas[rank][copy * num_bytes : (copy + 1) * num_bytes]

    def _check_arenas(self, weights: Tensor, states: Tensor) -> None:
        layout = self.kernel.layout
        for arena, given in ((layout.weights, weights), (layout.states, states)):
            if given.numel() < arena.num_bytes:
                raise LaunchError(
                    f"{arena.space.name.lower()} arena of {given.numel()} bytes",
                    expected=f"{arena.num_bytes} bytes",
                    remedy="allocate it with allocate_arena for the kernel's layout",
                )
