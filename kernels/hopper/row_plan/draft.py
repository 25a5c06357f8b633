"""Queues of the kernel of one row, as far as they are filled, and where tensors lie.

In: a segment, its fused ops, the layouts of its arenas. queues.py goes through the ops; for each, a
function of a file here adds instructions to the draft. Whoever publishes or keeps a result says
so in `made`, where readers look. Torch-free. Next on the walk: linear.py.
"""

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field

from distmega.kernels.hopper.plan.experts import expert_shape, last_matrices
from distmega.kernels.hopper.plan.matrices import Weights, num_units, rows_of, share, tiles_k
from distmega.kernels.hopper.plan.segment import find_agreement, is_ranked
from distmega.kernels.hopper.plan.types import (
    HEAD_DIMS,
    ROW_MULTIPLE,
    AttentionShape,
    Buffer,
    Epilogue,
    ExpertShape,
    Kept,
    Publishes,
    RowFormula,
    WeightMatrix,
    unfit,
)
from distmega.kernels.hopper.plan.words import NOTHING, UNIT_ROWS, Instruction
from distmega.kernels.runtime.arena import ArenaLayout
from distmega.kernels.runtime.report import REPORT_WORDS
from distmega.kernels.tasks.fuse import (
    Fused,
    FusedChoice,
    FusedContraction,
    FusedEmbedding,
    FusedGather,
    FusedPointwise,
    FusedRowAttention,
    Shown,
)
from distmega.kernels.tasks.mode import Mode
from distmega.program.types import Program

POLLED_WORDS = 2
"""Flagged words that a thread polls together."""


@dataclass(frozen=True, slots=True)
class Made:
    """Where a tensor lies. first: flagged word; words of `generation`; 0 of a tensor nobody polls.

    rows, streams: of the op that made it, which tell who keeps what of it. kept: first f32 element,
    or NOTHING.
    """

    first: int
    generation: int
    rows: int
    streams: int
    kept: int


@dataclass(slots=True)
class RowDraft:
    """What is known of a segment, and its queues as far as they are filled, op by op."""

    segment: Program
    fused: tuple[Fused, ...]
    weights: ArenaLayout
    states: ArenaLayout
    placed: Weights
    num_sms: int
    copies: int
    hears_all: bool
    """Whether SMs that keep rows of what ranks gather wait for all of it: so they hear of all."""
    team_rank: int
    mode: Mode
    divided: Container[str]
    shown: dict[str, Shown] = field(init=False)
    made: dict[str, Made] = field(default_factory=dict)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    """By name, in the order of dataflow."""
    num_words: int = REPORT_WORDS
    forms: dict[str, Publishes] = field(default_factory=dict)
    """What is published of each tensor."""
    uses: dict[str, int] = field(default_factory=dict)
    """Times that each buffer's class was written in this step."""
    queues: list[list[Instruction]] = field(default_factory=list)
    free: dict[int, list[int]] = field(default_factory=dict)
    """Kept elements that nobody takes any more, by number of elements."""
    num_kept: int = 0
    classes: list[str] = field(default_factory=list)
    epilogues: list[Epilogue] = field(default_factory=list)
    formulas: list[RowFormula] = field(default_factory=list)
    gathers: Mapping[str, FusedGather] = field(default_factory=dict)
    """Gathers over ranks, by what they take."""
    deferred: Mapping[str, str] = field(default_factory=dict)
    """Sums over ranks that readers add up, with the op that keeps each (deferred.py)."""
    tables: Mapping[str, FusedEmbedding] = field(default_factory=dict)
    """Embeddings besides the one whose row linears take, by what they give."""
    positions: str = ""
    wide_norms: bool = False
    lightest: list[int] = field(default_factory=list)
    embedding: FusedEmbedding | None = None
    entry: str = ""
    eps: float = 0.0
    num_ranks: int = 1
    attention: AttentionShape | None = None
    experts: ExpertShape | None = None
    choice: FusedChoice | None = None
    rank_logits: int = 0
    logits_at: int = 0

    # what the segment is

    def inspect(self) -> None:
        """What all ops share."""
        found = find_agreement(self.segment, self.fused, max_rows=1, head_dims=HEAD_DIMS)
        self.num_ranks, self.embedding, self.entry = found.num_ranks, found.embedding, found.entry
        self.choice, self.attention, self.eps = found.choice, found.attention, found.eps
        for op in self.fused:
            if isinstance(op, FusedRowAttention):
                raise unfit(f"{op.name!r}, attention of one row over itself")
        self.experts = expert_shape(self.fused, self.weights)
        if self.experts and not self.experts.has_all:
            raise unfit("one row of whole experts a rank")
        self.tables, self.positions = found.tables, found.positions
        self.gathers = {op.x: op for op in self.fused if isinstance(op, FusedGather)}
        self.placed.require_type("bf16", [self.embedding.table if self.embedding else ""])
        self.wide_norms = self.placed.has_wide_norms(self.fused)
        columns = self.placed.columns
        if any(length % ROW_MULTIPLE for length in columns.values()):
            raise unfit(f"rows of {sorted(set(columns.values()))} elements")

    def contractions(self) -> Iterator[FusedContraction]:
        """All of them, in order."""
        return (op for op in self.fused if isinstance(op, FusedContraction))

    def expert_matrix(self) -> WeightMatrix | None:
        """All last matrices of experts, from the first to the last."""
        names = last_matrices(self.fused)
        if self.experts is None or not names:
            return None
        shape = self.experts
        return self.placed.block_of(names, shape.width, shape.copied_slices)

    def entry_columns(self) -> int:
        """Elements of the row that comes in."""
        return self.elements(self.entry)

    def most_rows(self, rows: int) -> int:
        """Of so many rows, those of the SM that has the most."""
        return -(-num_units(rows) // self.num_sms) * UNIT_ROWS

    def generations(self) -> dict[str, int]:
        """Of each class of buffers: how many each of its copies has in a step."""
        return {name: -(-count // self.copies) for name, count in self.uses.items()}

    @property
    def num_generations(self) -> int:
        return max(self.generations().values(), default=1)

    # where things lie

    def reserve(self, name: str, size: int) -> int:
        """First of `size` flagged words of a buffer; known ones are used again."""
        if name not in self.buffers:
            self.buffers[name] = Buffer(name=name, first=self.num_words, num_words=size)
            self.num_words += -(-size // 16) * 16
        assert self.buffers[name].num_words == size, "ops of a class publish equally much"
        return self.buffers[name].first

    def first_of(self, name: str) -> int:
        """First word of a buffer, 0 if there is none."""
        return self.buffers[name].first if name in self.buffers else 0

    def turn(self, kind: str) -> tuple[str, int]:
        """Name of the copy that a class writes this time, and the generation there."""
        number = self.uses.get(kind, 0)
        self.uses[kind] = number + 1
        copy = number % self.copies
        return (f"{kind} #{copy}" if copy else kind), number // self.copies

    def keep(self, op: FusedContraction | FusedPointwise | FusedGather, rows: int) -> int:
        """First f32 element of what SMs keep of a result, NOTHING if nobody takes it. It may take
        the place of the operand, if nobody takes that afterwards.
        """
        nth = self.fused.index(op)
        for name in () if isinstance(op, FusedGather) else op.operands:
            before = self.made.get(name)
            if before and before.kept != NOTHING and not self.is_taken(name, nth):
                self.free.setdefault(before.rows, []).append(before.kept)
        ranked = isinstance(op, FusedContraction) and is_ranked(op, self.choice)
        outs = op.outs if isinstance(op, FusedContraction) else (op.out,)
        if not ranked and not any(self.is_taken(out, nth) for out in outs):
            return NOTHING
        return self.take_kept(rows)

    def take_kept(self, rows: int) -> int:
        """First of f32 elements for so many rows that nobody takes any more, or of new ones."""
        spare = self.free.get(rows)
        if spare:
            return spare.pop()
        first = self.num_kept
        self.num_kept += -(-rows // 64) * 64
        return first

    def is_taken(self, name: str, nth: int) -> bool:
        """Whether an op after number `nth` carries a tensor or normalises it, or it leaves."""
        return name in map(self.storage, self.segment.outputs) or any(
            name in op.operands
            if isinstance(op, FusedPointwise)
            else isinstance(op, FusedContraction)
            and (name in op.operands or bool(op.normed and op.x == name))
            for op in self.fused[nth + 1 :]
        )

    def outputs(self) -> tuple[Kept, ...]:
        """Where outputs lie that no other rule brings out."""
        own = {self.choice.chosen, self.choice.logits} if self.choice else set()
        found = []
        for name in self.segment.outputs:
            if name in own:
                continue
            made = self.made.get(self.storage(name))
            if made is None or made.kept == NOTHING or made.rows != self.elements(name):
                raise unfit(f"output {name!r}, which SMs do not keep")
            found.append(Kept(tensor=name, first=made.kept, num=made.rows))
        return tuple(found)

    def elements(self, name: str) -> int:
        return self.segment.tensor_map()[name].num_elements

    def length(self, op: FusedContraction) -> int:
        """Elements of x."""
        if op.experts and op.experts.by == "columns":
            assert self.experts is not None
            return self.experts.columns
        return self.placed.columns[op.streams[0].weights[0]]

    def of_x(self, op: FusedContraction | FusedPointwise) -> Made:
        """Where x lies; nowhere if it is the given row, which is looked up."""
        if op.x in self.made:
            return self.made[op.x]
        if op.x != self.entry:
            raise unfit(f"{op.name!r} of {op.x!r}, which no op publishes")
        return Made(0, 0, self.entry_columns(), 1, NOTHING)

    def carried(self, op: str, name: str, rows: int, streams: int) -> tuple[int, bool]:
        """Where an operand of `op` lies that the SM keeps, and whether it is the given row."""
        made = self.made.get(name)
        if name == self.entry and (made is None or made.kept == NOTHING):
            if self.entry_columns() != rows:
                raise unfit(f"{op!r}, which takes {name!r} of another size")
            return NOTHING, True
        if made is None or made.kept == NOTHING or (made.rows, made.streams) != (rows, streams):
            raise unfit(f"{op!r}, which takes {name!r} from other SMs")
        return made.kept, False

    def find_lightest(self) -> None:
        """SMs in the order of the tiles that contractions give them: cached keys and values, and
        the work on them, go to those with the fewest.
        """
        load = [0] * self.num_sms
        for op in self.fused:
            if isinstance(op, FusedContraction) and not is_ranked(op, self.choice):
                rows = rows_of(op, self.placed)
                tiles = tiles_k(self.length(op))
                for sm in range(self.num_sms):
                    first, last = share(rows, len(op.streams), sm, self.num_sms)
                    load[sm] += (last - first) * tiles
        self.lightest = sorted(range(self.num_sms), key=lambda sm: (load[sm], sm))

    def storage(self, name: str) -> str:
        return self.shown[name].tensor if name in self.shown else name

    def first_word(self, name: str) -> int:
        """Of a tensor or a part of one that is published as numbers; -1 if none is."""
        made = self.made.get(self.storage(name))
        first = self.shown[name].first if name in self.shown else 0
        return made.first + first if made else -1
