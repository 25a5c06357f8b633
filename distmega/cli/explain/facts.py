"""What explain tells, as plain values: `asdict` of an ExplainReport is what `--json` prints.

Times are microseconds, sizes bytes, of one rank and one decode step unless a name says otherwise.
Next: collect.py, which fills these in.
"""

from dataclasses import dataclass
from typing import Literal

from distmega.program.kinds import communicates

Bound = Literal["bytes", "flops", "launch"]
"""What an op's predicted time is mostly made of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFacts:
    """A tensor: its whole shape, and for each dim the mesh axes that divide it, "" for none.
    partial: mesh axes over whose ranks it is still to be summed up.
    """

    name: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    num_bytes: int
    rank_bytes: int
    partial: tuple[str, ...] = ()

    def __str__(self) -> str:
        both = zip(self.shape, self.axes, strict=True)
        dims = (f"{extent}/{axes}" if axes else str(extent) for extent, axes in both)
        partial = f" parts over {', '.join(self.partial)}" if self.partial else ""
        return f"{self.dtype}[{', '.join(dims)}]{partial}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """Another way to divide an op along a mesh axis. choice: the iteration axis, or "whole".
    change_us: what it alone would add, with everything around it as planned, None where `why` rules
    it out. why: the reason, for one that looks cheaper why it lost.
    """

    mesh_axis: str
    choice: str
    change_us: float | None
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpFacts:
    """An op on a rank. divided: as "h/tp", an iteration axis by a mesh axis. reads, writes: local
    tensors, which name edges of the diagram. weights: those of its operands that live across steps.
    """

    name: str
    kind: str
    time_us: float
    num_bytes: int
    flops: int
    bound: Bound
    divided: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    weights: tuple[str, ...]
    rejected: tuple[Rejected, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveFacts:
    """A collective, or a local slice that changes a layout. kind: with what it combines by, as in
    "all_reduce sum"; num_bytes: that a rank sends.
    """

    name: str
    kind: str
    mesh_axis: str
    time_us: float
    num_bytes: int
    reads: tuple[str, ...]
    writes: tuple[str, ...]

    @property
    def communicates(self) -> bool:
        return communicates(self.kind.split()[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeFacts:
    """Where a step's predicted time goes, if every op were a library call, one after another.

    launch_us: fixed time of ops. bytes_us, flops_us: of ops that are bound by either. least_us: all
    bytes of ops at the rate of memory, nothing else.
    """

    bytes_us: float
    flops_us: float
    launch_us: float
    collectives_us: float
    least_us: float

    @property
    def total_us(self) -> float:
        return self.bytes_us + self.flops_us + self.launch_us + self.collectives_us

    def parts(self, *, kernel: bool = False) -> tuple[tuple[str, float], ...]:
        """Words and times of the parts, the largest first; kernel: of those that one kernel has,
        which launches nothing and calls no library for collectives.
        """
        parts = [("reading and writing", self.bytes_us), ("arithmetic", self.flops_us)]
        if not kernel:
            parts += [("launches", self.launch_us), ("collectives", self.collectives_us)]
        return tuple(sorted(parts, key=lambda part: -part[1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """What a rank holds; temporaries at their peak."""

    weight_bytes: int
    state_bytes: int
    input_bytes: int
    temp_peak_bytes: int
    peer_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.parts())

    def parts(self) -> tuple[tuple[str, int], ...]:
        """Words and sizes."""
        return (
            ("weights", self.weight_bytes),
            ("KV cache", self.state_bytes),
            ("inputs", self.input_bytes),
            ("temporaries", self.temp_peak_bytes),
            ("peer memory", self.peer_bytes),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedSpan:
    """A predicted interval on a track of a rank, such as "stream 0" or "collectives tp"."""

    track: str
    name: str
    kind: str
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentFacts:
    """A segment as the tasks of a persistent kernel that run in each launch, and the events that
    these wait for. tasks: number by what they do.
    """

    name: str
    num_ops: int
    num_tasks: int
    num_sms: int
    num_events: int
    tasks: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """The host program: its text without segments, and what it costs the host. segment_texts: what
    each segment prints as, in a full report.
    """

    text: str
    segment_texts: tuple[str, ...]
    num_instructions: int
    host_us: float
    replay_us: float
    segments: tuple[SegmentFacts, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFacts:
    """One stage of a pipeline, or all there is. ranks: the mesh of its ranks. runs_as: what does a
    step there; one_kernel: a persistent one. notes: what else a reader should know. tensors: of the
    program; parts: those that ranks hold, under local names. plan_text: the plan's own words, of a
    full report.
    """

    index: int
    ranks: tuple[tuple[str, int], ...]
    runs_as: str
    one_kernel: bool
    notes: tuple[str, ...]
    time: TimeFacts
    memory: MemoryFacts
    ops: tuple[OpFacts, ...]
    collectives: tuple[CollectiveFacts, ...]
    tensors: tuple[TensorFacts, ...]
    parts: tuple[TensorFacts, ...]
    overlaps: tuple[str, ...]
    host: HostFacts
    timeline: tuple[PredictedSpan, ...]
    plan_text: str

    @property
    def num_ranks(self) -> int:
        total = 1
        for _, size in self.ranks:
            total *= size
        return total

    @property
    def bound(self) -> str:
        """What takes most of the predicted time, and what would as one kernel, if it is one."""
        library, kernel = self.time.parts()[0][0], self.time.parts(kernel=True)[0][0]
        if not self.one_kernel or library == kernel:
            return library
        return f"{library}; as one kernel by {kernel}"

    @property
    def first_rank(self) -> int:
        """Number of the stage's first rank among all; each stage has as many."""
        return self.index * self.num_ranks

    @property
    def sent_bytes(self) -> int:
        return sum(one.num_bytes for one in self.collectives)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainReport:
    """All that explain tells of a model's decode step."""

    model: str
    machine: str
    batch: int
    num_layers: int
    memory_limit_bytes: int | None
    stages: tuple[StageFacts, ...]

    @property
    def step(self) -> str:
        """What figures of a step are for."""
        return "a token" if self.batch == 1 else f"a step of {self.batch} tokens"
