"""Runs a megakernel's records on one GPU, as one rank of its team.

In: a Megakernel and this rank's weight and state arenas on the GPU. Out: a KernelRunner for
hostir/run/evaluator.py: `launch` copies inputs in, launches, copies outputs out; weights and states
are used where they lie. It makes only calls that a CUDA graph holds. Next on the walk:
../whole.py.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from distmega.hostir.ir.nodes import segment_args
from distmega.kernels.cpu.peer import COUNTER_BYTES
from distmega.kernels.megakernel import Megakernel
from distmega.kernels.records.arguments import ArenaMemory, Events, Member, Tables
from distmega.kernels.records.diagnosis import explain_record_hang
from distmega.kernels.records.kernel import run_records
from distmega.kernels.records.specs import find_specs
from distmega.kernels.records.timeline import NUM_STAMPS, record_spans
from distmega.kernels.runtime.alarm import LOCAL_LIMIT_S, Alarm
from distmega.kernels.runtime.arena import PEER_BUFFERS, Space, round_up, tensor_space
from distmega.kernels.runtime.memory import allocate_arena, operand_view
from distmega.kernels.runtime.report import REPORT_WORDS
from distmega.kernels.runtime.symmetric import Team
from distmega.trace_file import Span

WARPS = 8


class RecordRunner:
    """A megakernel bound to the memory of one GPU."""

    replays = True

    def __init__(
        self,
        kernel: Megakernel,
        *,
        rank: int,
        weights_arena: Tensor,
        state_arena: Tensor,
        team: Team | None = None,
        timeout_s: float = LOCAL_LIMIT_S,
    ) -> None:
        """weights_arena, state_arena: uint8, as allocate_arena makes them for kernel.layout.weights
        and .states. team: the ranks that share the kernel, which must all make their runner
        together; timeout_s: bound on a wait for one of them.
        """
        self.kernel, self._rank, device = kernel, rank, weights_arena.device
        encoded = kernel.encoded
        self._specs, self._numbers = find_specs(encoded)
        self._num_sms, self._longest = encoded.queues.shape[:2]
        found = (encoded.queues, encoded.lengths, self._numbers, encoded.waits, encoded.signals)
        self._tables = Tables(*(_on(device, torch.from_numpy(one)) for one in found))
        activations = allocate_arena(kernel.layout.activations, 1, str(device))
        self._memory = ArenaMemory(weights_arena, state_arena, activations)
        shared = team if kernel.team_axes else None
        self._events, self._member = self._open_peer_memory(shared, device)
        limit_s = timeout_s if shared else min(timeout_s, LOCAL_LIMIT_S)
        self._report = torch.zeros(REPORT_WORDS, dtype=torch.int64, device=device)
        self._alarm = Alarm(self._report, limit_s)
        operands, memory = kernel.layout.operands, (weights_arena, state_arena, activations)
        args = [t for t in segment_args(kernel.segment) if tensor_space(t) is Space.ACT]
        views = {t.name: operand_view(memory, operands[t.name]) for t in args}
        self._inputs = {t.name: views[t.name] for t in args if t.role == "input"}
        self._outputs = {t.name: views[t.name] for t in args if t.role == "temp"}

    def _open_peer_memory(self, team: Team | None, device: torch.device) -> tuple[Events, Member]:
        """Memory that peers write, of this rank alone without a team: counters of events, then the
        copies of the receive buffers.
        """
        kernel = self.kernel
        lanes, lane = (team.size, team.team_rank) if team else (1, 0)
        counter_bytes = round_up(COUNTER_BYTES * max(kernel.encoded.num_events, 1) * lanes)
        copy_bytes = round_up(kernel.layout.peers.num_bytes)
        num_bytes = counter_bytes + PEER_BUFFERS * copy_bytes
        self._shared = team.open(num_bytes) if team else None
        if self._shared:
            own, firsts = self._shared.local, self._shared.pointers
        else:
            own = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            firsts = (own.data_ptr(),)
        events = Events(
            epoch=torch.ones(1, dtype=torch.int32, device=device),
            counters=own[:counter_bytes].view(torch.int32),
            others=torch.tensor(firsts, device=device),
            lanes=lanes,
            lane=lane,
        )
        arenas = [
            first + counter_bytes + copy * copy_bytes
            for copy in range(PEER_BUFFERS)
            for first in firsts
        ]
        coordinates = (*kernel.mesh.coordinate(self._rank).values(), 0)
        return events, Member(
            coordinates=torch.tensor(coordinates, dtype=torch.int32, device=device),
            arenas=torch.tensor(arenas, device=device),
        )

    def launch(self, tensors: Mapping[str, Tensor]) -> None:
        """Runs the kernel once. `tensors`: segment_args of the segment by name; outputs are
        written.
        """
        self._launch(tensors, None)

    def trace_launch(self, tensors: Mapping[str, Tensor]) -> list[Span]:
        """As launch, but gives its timeline, on the GPU's clock, once it has ended."""
        shape = self._num_sms, self._longest, NUM_STAMPS
        stamps = torch.zeros(shape, dtype=torch.int64, device=self._report.device)
        self._launch(tensors, stamps)
        found = stamps.tolist()
        self.raise_hang()
        return list(record_spans(self.kernel.encoded, self._numbers, found, self._rank))

    def _launch(self, tensors: Mapping[str, Tensor], stamps: Tensor | None) -> None:
        self.raise_hang()
        for name, view in self._inputs.items():
            view.copy_(tensors[name])
        run_records[(self._num_sms,)](
            self._tables,
            self._memory,
            self._events,
            self._member,
            self._report,
            self._longest,
            stamps,
            self._specs,
            num_warps=WARPS,
            num_stages=1,
            maxnreg=255,
            launch_cooperative_grid=True,
        )
        self._events.epoch.add_(1)
        for name, view in self._outputs.items():
            tensors[name].copy_(view)

    def raise_hang(self) -> None:
        """HangError if a wait of an earlier launch has expired, once; costs nothing if none has,
        and waits for those launches if so.
        """
        if report := self._alarm.take():
            raise explain_record_hang(
                self.kernel, report, limit_s=self._alarm.limit_s, rank=self._rank
            )


def _on(device: torch.device, table: Tensor) -> Tensor:
    """A table in the GPU's memory, never empty."""
    return table.to(device) if table.numel() else torch.zeros(1, dtype=torch.int32, device=device)
