"""Queues of the kernel of one row: which SM computes which rows of which fused op, where data lie.

In: fused ops (tasks/fuse/) in any order that follows their data, and the layouts of the weight and
state arenas. Out: a RowQueues: the instructions of every SM, sizes of what they exchange and keep,
and what the kernel is specialised for. Torch-free. Next on the walk: one_row/runner.py.

Every SM gets the same number of rows of each matrix. No event orders the tasks: a reader polls the
words it needs until they carry the flag of their step and generation. Ops of one class, like those
of equal layers, publish into one buffer in turn, its generations. That nobody overwrites what
another has yet to read follows from paths of the dataflow, which proof.py finds for each program;
where there is none, a class gets two buffers that take turns, or fewer SMs take part.

What the pointwise ops of an epilogue take besides products stays with the SM that made it, in f32:
the rows of two ops with equally many rows belong to the same SMs. Where ranks share the program,
all have the same queues, so an SM owns the same rows on each. It pushes its part of a sum over
ranks into the buffers of its likes, and each adds them up.

Experts of one row: there are as many slots as experts are chosen, so all tiles are known, and only
where they lie is not. Slots lie one behind the other, as rows of the first product and as columns
of the last. Every SM that has tiles of theirs chooses for itself, from scores that all poll.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product

from distmega.kernels.hopper.plan.experts import expert_shape, find_wrong_slot, last_matrices
from distmega.kernels.hopper.plan.matrices import (
    Weights,
    input_columns,
    num_units,
    rows_of,
    share,
    tiles_k,
)
from distmega.kernels.hopper.plan.pointwise import MAX_CARRIED, in_order, split_operands
from distmega.kernels.hopper.plan.segment import find_agreement
from distmega.kernels.hopper.plan.types import (
    HEAD_DIMS,
    ITEM_BYTES,
    ROW_MATRICES,
    ROW_MULTIPLE,
    AttentionShape,
    Buffer,
    Epilogue,
    ExpertShape,
    Kept,
    Publishes,
    RowFormula,
    RowQueues,
    WeightMatrix,
    num_stages,
    padded_tiles_k,
    unfit,
)
from distmega.kernels.hopper.plan.words import (
    AT_POSITION,
    BIASED,
    CARRY_EMBEDDED,
    CARRY_TWO,
    EMBEDDED,
    EXPERT_COLUMNS,
    EXPERT_ROWS,
    FROM_EMBEDDING,
    KEEP_NORMED,
    LAYER_NORM,
    MAX_EPILOGUES,
    MAX_SMS,
    MAX_SPLITS,
    NO_WINDOW,
    NOTHING,
    PAIRED,
    PARTIAL_EXTRA,
    REPORT_WORDS,
    SAMPLE_CHUNK,
    SEARCH_CHUNKS,
    STAGE_CHUNKS,
    TILE_K,
    UNIT_ROWS,
    Instruction,
    RowAttention,
    RowBarrier,
    RowCombine,
    RowEmbed,
    RowLinear,
    RowPointwise,
    RowRoute,
    RowSample,
)
from distmega.kernels.hopper.row_plan.proof import find_hazard, find_late_start
from distmega.kernels.hopper.row_plan.starts import add_starts
from distmega.kernels.runtime.arena import ArenaLayout
from distmega.kernels.tasks.fuse import (
    IDENTITY,
    Fused,
    FusedAttention,
    FusedChoice,
    FusedContraction,
    FusedEmbedding,
    FusedGather,
    FusedPointwise,
    FusedRouting,
    FusedSample,
    InputNorm,
    Shown,
    first_that_fits,
    shown_by_views,
)
from distmega.kernels.tasks.graph import Mode
from distmega.program.types import Program

EMBED_WORDS = 256
"""Flagged words of the embedded token that one SM pushes: one a thread."""
MAX_COPIES = 2
"""Buffers of one class, at most, before each op gets its own."""
MAX_NORMED_UNITS = MAX_SMS // UNIT_ROWS
"""Units of a row that an SM keeps normalised, at most: an element a thread."""
MAX_ROWS = 8 * MAX_SMS
"""Rows of pointwise work of an SM, at most: eight a thread."""
POLLED_WORDS = 2
"""Flagged words that a thread polls together."""


def build_queues(
    segment: Program,
    weights: ArenaLayout,
    states: ArenaLayout,
    num_sms: int,
    team_rank: int = 0,
    mode: Mode = "overlap",
    divided: Container[str] = (),
) -> RowQueues:
    """Queues for at most `num_sms` SMs of rank `team_rank` of its team. mode "op": each
    fused op waits for all SMs to be done with the one before, as with one event an op; a baseline,
    and an oracle for the results. divided: tensors of which each rank has another part.
    UnsupportedError where the kernel can't do the segment.
    """

    def build(fused: tuple[Fused, ...]) -> RowQueues:
        placed = Weights(segment, weights, ROW_MATRICES, last_matrices(fused))
        hazard = ""
        for way in _ways(fused, placed, min(num_sms, MAX_SMS)):
            queues = _Builder(
                segment, fused, weights, states, placed, *way, team_rank, mode, divided
            ).build()
            _require_slots(queues)
            if not queues.token and find_late_start(queues):
                queues = add_starts(queues)
            hazard = find_hazard(queues) or find_wrong_slot(queues)
            if not hazard:
                return queues
        raise unfit(f"a segment where {hazard}")

    return first_that_fits(segment, build, partial(takes_norm, weights))


def takes_norm(weights: ArenaLayout, norm: InputNorm, length: int, is_shared: bool) -> bool:
    """Whether linears can do a norm of so many elements; `is_shared` if the SMs keep its result."""
    weight = weights.tensors.get(norm.weight)
    is_wide = weight is not None and weight.dtype == "f32"
    if norm.kind == "layer_norm":
        return bool(norm.bias) and not is_wide and tiles_k(length) <= STAGE_CHUNKS
    return not (is_wide and is_shared)


def _require_slots(queues: RowQueues) -> None:
    """UnsupportedError unless a block of keys and values fits into the ring."""
    stages = num_stages(padded_tiles_k(queues.max_tiles_k))
    if queues.attention and stages < queues.attention.block_slots:
        dim, length = queues.attention.head_dim, TILE_K * queues.max_tiles_k
        raise unfit(f"heads of {dim} beside a row of {length} elements in an SM's memory")


def _ways(fused: Sequence[Fused], placed: Weights, num_sms: int) -> Iterator[tuple[int, int, bool]]:
    """SMs, buffers a class and _Builder.hears_all to try, from the fastest on: all SMs, then no
    more than have rows in each of the larger contractions; few buffers, then one an op.
    """
    products = [op for op in fused if isinstance(op, FusedContraction)]
    chosen = {op.source for op in fused if isinstance(op, FusedChoice)}
    for op in products:
        if chosen.intersection(op.outs):  # every SM has a part in the choice of a token
            num_sms = min(num_sms, num_units(rows_of(op, placed)))
    units = {num_units(rows_of(op, placed)) for op in products}
    sizes = sorted({num_sms, *(one for one in units if one < num_sms)}, reverse=True)
    hears = (False, True) if any(isinstance(op, FusedGather) for op in fused) else (False,)
    yield from product(sizes, range(1, MAX_COPIES + 1), hears)
    yield from product(sizes, (len(fused),), hears)


@dataclass(frozen=True, slots=True)
class _Made:
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
class _Builder:
    """Fills the queues op by op."""

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
    made: dict[str, _Made] = field(default_factory=dict)
    buffers: list[Buffer] = field(default_factory=list)
    num_words: int = REPORT_WORDS
    forms: dict[str, Publishes] = field(default_factory=dict)
    """What is published of each tensor."""
    uses: dict[str, int] = field(default_factory=dict)
    """Times that each buffer's class was written in this step."""
    firsts: dict[str, int] = field(default_factory=dict)
    """First word of each buffer by name."""
    queues: list[list[Instruction]] = field(default_factory=list)
    free: dict[int, list[int]] = field(default_factory=dict)
    """Kept elements that nobody takes any more, by number of elements."""
    num_kept: int = 0
    classes: list[str] = field(default_factory=list)
    epilogues: list[Epilogue] = field(default_factory=list)
    formulas: list[RowFormula] = field(default_factory=list)
    gathers: Mapping[str, FusedGather] = field(default_factory=dict)
    """Gathers over ranks, by what they take."""
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
    vocab: int = 0
    logits_at: int = 0

    def build(self) -> RowQueues:
        self.queues = [[] for _ in range(self.num_sms)]
        self.shown = shown_by_views(self.segment)
        self.inspect()
        self.fused = tuple(in_order(op, self.tables, self.entry) for op in self.fused)
        self.find_classes()
        self.epilogues = self.find_epilogues()
        if self.choice and not any(one.ranked for one in self.epilogues):
            raise unfit(f"a choice from {self.choice.source!r}")
        self.find_lightest()
        self.add_embedding()
        for i, op in enumerate(self.fused):
            match op:
                case FusedContraction():
                    self.add_contraction(i, op)
                case FusedAttention():
                    self.add_attention(i, op)
                case FusedRouting():
                    self.add_routing(op)
                case FusedPointwise():
                    self.add_pointwise(i, op)
                case FusedGather():
                    self.add_gather(i, op)
                case FusedChoice():
                    self.add_choice(op)
            if i + 1 < len(self.fused) and not isinstance(self.fused[i + 1], FusedChoice):
                self.add_barrier(i)
        head, sampler = self.choice, self.choice.sampler if self.choice else None
        attention = next((op for op in self.fused if isinstance(op, FusedAttention)), None)
        if head:
            self.reserve_choice(head)
        return RowQueues(
            num_ranks=self.num_ranks,
            mode=self.mode,
            attention=self.attention,
            epilogues=tuple(self.epilogues),
            formulas=tuple(self.formulas),
            wide_norms=self.wide_norms,
            num_generations=self.num_generations,
            max_tiles_k=max(tiles_k(self.length(op)) for op in self.contractions()),
            eps=self.eps,
            matrices=self.placed.matrices,
            queues=tuple(tuple(map(self.chosen_last, queue)) for queue in self.queues),
            num_kept=self.num_kept,
            outputs=self.outputs(),
            sampler=sampler,
            vocab=self.vocab,
            head_rows=self.head_rows(sampler) if head else 0,
            logits_at=self.logits_at,
            best=self.firsts.get("best", 0),
            sample=self.firsts.get("sample", 0),
            num_words=self.num_words,
            buffers=tuple(self.buffers),
            first_id=self.team_rank * self.vocab,
            embed=self.embedding.table if self.embedding else self.entry,
            hidden=self.hidden(),
            rope_table=attention.table if attention else "",
            tokens=self.embedding.ids if self.embedding else "",
            positions=self.positions,
            token=head.token if head else "",
            logits=head.logits if head else "",
            experts=self.experts,
            expert_matrix=self.expert_matrix(),
        )

    # what the segment is

    def inspect(self) -> None:
        """What all ops share."""
        found = find_agreement(self.segment, self.fused, max_rows=1, head_dims=HEAD_DIMS)
        self.num_ranks, self.embedding, self.entry = found.num_ranks, found.embedding, found.entry
        self.choice, self.attention, self.eps = found.choice, found.attention, found.eps
        self.experts = expert_shape(self.fused, self.weights)
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

    def hidden(self) -> int:
        """Elements of the row that comes in."""
        return self.elements(self.entry)

    def generations(self) -> dict[str, int]:
        """Of each class of buffers: how many each of its copies has in a step."""
        return {name: -(-count // self.copies) for name, count in self.uses.items()}

    @property
    def num_generations(self) -> int:
        return max(self.generations().values(), default=1)

    def chosen_last(self, one: Instruction) -> Instruction:
        """The instruction, of the last generation of all if a token is chosen by it: a step begins
        with the last flag of the one before.
        """
        last = self.num_generations - 1
        if isinstance(one, RowSample):
            return replace(one, generation=last)
        if isinstance(one, RowLinear) and self.epilogues[one.opcode].ranked:
            delta = one.flag_delta + last - one.generation
            return replace(one, generation=last, flag_delta=delta)
        return one

    # classes of ops, and the epilogues

    def find_classes(self) -> None:
        """A name for each op's buffers, that of the first op that computes alike."""
        known: dict[tuple[object, ...], str] = {}
        of: dict[str, str] = {}
        for op in self.fused:
            key = self.signature(op)
            if isinstance(op, FusedAttention):
                key = "attention", of.get(self.storage(op.q), "")
            self.classes.append(known.setdefault(key, op.name))
            if isinstance(op, FusedContraction):
                of |= dict.fromkeys(op.outs, self.classes[-1])
            elif isinstance(op, FusedPointwise):
                of[op.out] = self.classes[-1]

    def signature(self, op: Fused) -> tuple[object, ...]:
        """What an op computes, its names apart."""
        if isinstance(op, FusedPointwise):
            return (
                "pointwise",
                self.elements(op.out),
                bool(op.x),
                op.formula,
                *self.roles((op.out,)),
            )
        if not isinstance(op, FusedContraction):
            return (type(op).__name__,)
        sizes = tuple(self.placed.rows_of(name) for stream in op.streams for name in stream.weights)
        slots, roles = op.experts and op.experts.by, self.roles(op.outs)
        ranks = op.num_ranks, self.is_gathered(op)
        return "contraction", self.length(op), sizes, op.formula, *ranks, slots, *roles

    def roles(self, outs: Sequence[str]) -> Iterator[int]:
        """As what attention takes results: queries, keys or values, which are of one generation."""
        for op in self.fused:
            if isinstance(op, FusedAttention):
                names = [self.storage(name) for name in (op.q, op.k, op.v)]
                yield from (names.index(name) for name in outs if name in names)

    def find_epilogues(self) -> list[Epilogue]:
        """Those of all contractions. Ops that differ only in whether somebody polls their result
        share one.
        """
        found: dict[tuple[object, ...], Epilogue] = {}
        for op in self.fused:
            if isinstance(op, FusedContraction):
                one = self.epilogue(op)
                key = self.epilogue_key(op)
                if key not in found or found[key].publishes == "nothing":
                    found[key] = one
        if len(found) > MAX_EPILOGUES:
            raise unfit(f"{len(found)} different epilogues")
        return list(found.values())

    def epilogue(self, op: FusedContraction) -> Epilogue:
        if len(op.operands) > MAX_CARRIED or (op.operands and len(op.streams) > 1):
            raise unfit(f"{op.name!r}, whose epilogue takes {op.operands}")
        if self.is_ranked(op) and (len(op.streams) > 1 or op.num_ranks > 1):
            raise unfit(f"{op.name!r}, which a token is chosen from, of several products")
        return Epilogue(
            num_streams=len(op.streams),
            formula=op.formula,
            publishes=self.publishes(op.name, op.outs, len(op.streams)),
            num_carried=len(op.operands),
            summed=op.num_ranks > 1,
            ranked=self.is_ranked(op),
            weighted=self.is_weighted(op),
            gathered=self.is_gathered(op),
        )

    def is_gathered(self, op: FusedContraction) -> bool:
        """Whether all ranks get its result, side by side."""
        if not self.gathers.keys().isdisjoint(op.outs):
            if len(op.outs) > 1 or op.num_ranks > 1 or self.is_weighted(op):
                raise unfit(f"{op.name!r}, a sum over ranks or of several results, gathered")
            return True
        return False

    def is_weighted(self, op: FusedContraction) -> bool:
        return op.experts is not None and op.experts.by == "rows"

    def epilogue_key(self, op: FusedContraction) -> tuple[object, ...]:
        numbers = self.publishes(op.name, op.outs, len(op.streams)) == "numbers"
        ranked, weighted = self.is_ranked(op), self.is_weighted(op)
        summed, gathered = op.num_ranks > 1, self.is_gathered(op)
        return len(op.streams), op.formula, numbers, summed, ranked, weighted, gathered

    def epilogue_number(self, op: FusedContraction) -> int:
        key = self.epilogue_key(op)
        return next(
            i
            for i, one in enumerate(self.epilogues)
            if (
                one.num_streams,
                one.formula,
                one.publishes == "numbers",
                one.summed,
                one.ranked,
                one.weighted,
                one.gathered,
            )
            == key
        )

    def is_ranked(self, op: FusedContraction) -> bool:
        return self.choice is not None and op.outs == (self.choice.source,)

    def publishes(self, name: str, outs: tuple[str, ...], num_streams: int = 1) -> Publishes:
        """What readers of an op's results poll: attention and the choice of experts take numbers,
        contractions pairs, and pointwise work either, numbers where pairs are no whole polls.
        """
        by_attention = by_linears = by_rows = False
        gather = next((self.gathers[out] for out in outs if out in self.gathers), None)
        if gather is not None:
            self.require_only_gathered(gather)
            outs = (gather.out,)
        for other in self.fused:
            match other:
                case FusedAttention():
                    attended = map(self.storage, (other.q, other.k, other.v))
                    by_attention |= bool(set(outs).intersection(attended))
                case FusedRouting():
                    by_attention |= other.scores in outs
                case FusedContraction():
                    by_linears |= other.x in outs
                case FusedPointwise() if other.x in outs:
                    by_rows = True
                    by_attention |= self.elements(other.x) % (2 * POLLED_WORDS) != 0
        if gather is not None and not (by_attention or by_linears or by_rows):
            by_attention, by_linears = num_streams == 1, num_streams > 1
        if by_attention and (by_linears or num_streams > 1):
            raise unfit(f"{name!r}, whose readers take numbers and pairs")
        return "numbers" if by_attention else "pairs" if by_linears or by_rows else "nothing"

    def require_only_gathered(self, gather: FusedGather) -> None:
        """Refuses parts of a gather that others poll too, or that end within a pair."""
        others = [op for op in self.fused if op is not gather]
        polled = {op.x for op in others if isinstance(op, FusedContraction | FusedPointwise)}
        if gather.x in polled or self.elements(gather.x) % 2:
            raise unfit(f"{gather.name!r} of {gather.x!r}, of {self.elements(gather.x)} elements")

    # buffers

    def reserve(self, name: str, size: int) -> int:
        """First of `size` flagged words of a buffer; known ones are used again."""
        if name not in self.firsts:
            self.firsts[name] = self.num_words
            self.buffers.append(Buffer(name=name, first=self.num_words, num_words=size))
            self.num_words += -(-size // 16) * 16
        return self.firsts[name]

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
        is_ranked = isinstance(op, FusedContraction) and self.is_ranked(op)
        outs = op.outs if isinstance(op, FusedContraction) else (op.out,)
        if not is_ranked and not any(self.is_taken(out, nth) for out in outs):
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
        own = {self.choice.token, self.choice.logits} if self.choice else set()
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

    # instructions

    def add_embedding(self) -> None:
        """Where ranks share the matrix, those with a part of the token's row push it to all. Of an
        input, which all have, each pushes columns of its own: so who has read the row knows of
        every rank that it is done with the launch before.
        """
        if self.num_ranks == 1:
            return
        op, hidden = self.embedding, self.hidden()
        given = op.table if op else self.entry
        if given in self.divided and (op is None or op.num_ranks == 1):
            raise unfit(f"a row of {given!r}, of which ranks have parts that others don't ask for")
        first = self.reserve("embedded", hidden // 2)
        assert first == EMBEDDED
        kept = self.take_kept(hidden) if self.keeps_entry() else NOTHING
        self.made[self.entry] = made = _Made(first, 0, hidden, 1, kept)
        if op is None:
            parts = [input_columns(hidden, rank, self.num_ranks) for rank in range(self.num_ranks)]
            own, num_columns = parts[self.team_rank], max(map(len, parts))
            one = RowEmbed(
                name=self.entry,
                row0=0,
                num_rows=1,
                column=own.start // 2,
                start=own.start // 2,
                num_words=own.stop // 2,
                dst=first,
            )
        else:
            rows, num_columns = self.weights.tensors[op.table].shape
            is_whole = num_columns == hidden
            one = RowEmbed(
                name=op.name,
                row0=self.team_rank * rows if is_whole else 0,
                num_rows=rows,
                column=0,
                num_words=num_columns // 2,
                dst=first + (0 if is_whole else self.team_rank * num_columns // 2),
            )
        for number, word in enumerate(range(0, num_columns // 2, EMBED_WORDS)):
            self.queues[self.lightest[number % self.num_sms]].append(
                replace(one, column=one.column + word)
            )
        if kept != NOTHING:
            self.add_copies(self.entry, made, "copy")

    def keeps_entry(self) -> bool:
        """Whether SMs keep their rows of what ranks hand out: where others than sums over ranks,
        which look them up, take them otherwise than by polling.
        """
        return self.entry in map(self.storage, self.segment.outputs) or any(
            self.entry in op.operands
            if isinstance(op, FusedPointwise)
            else isinstance(op, FusedContraction)
            and (
                (self.entry in op.operands and op.num_ranks == 1)
                or bool(op.normed and op.x == self.entry)
            )
            for op in self.fused
        )

    def add_contraction(self, nth: int, op: FusedContraction) -> None:
        """The rows of its matrix, shared out."""
        rows = rows_of(op, self.placed)
        streams = len(op.streams)
        out_rows = rows // streams
        number = self.epilogue_number(op)
        epilogue = self.epilogues[number]
        size = {"nothing": 0, "numbers": rows, "pairs": out_rows // 2}[epilogue.publishes]
        kind, generation = self.turn(self.classes[nth])
        if op.num_ranks > 1:
            self.reserve(f"parts of {kind}", self.num_ranks * rows)
        if self.is_ranked(op):
            self.vocab, limit = rows, min(rows, max(0, self.choice_vocab() - self.team_rank * rows))
            dst, generation = self.reserve_logits(rows), self.of_x(op).generation
        elif epilogue.gathered:
            dst, limit = self.reserve(kind, self.num_ranks * size) + self.team_rank * size, rows
        else:
            dst, limit = self.reserve(kind, size), rows
        x = self.of_x(op)
        is_given = op.x == self.entry
        columns = self.length(op)
        matrix, starts = self.weight_rows(op)
        by_rows = self.is_weighted(op)
        flags = FROM_EMBEDDING if is_given and self.num_ranks == 1 else 0
        flags |= PAIRED if streams == 2 else 0
        flags |= LAYER_NORM if op.norm and op.norm.kind == "layer_norm" else 0
        if op.experts:
            flags |= EXPERT_ROWS if by_rows else EXPERT_COLUMNS
        carries = [self.carried(op.name, name, out_rows, streams) for name in op.operands]
        if any(embedded for _, embedded in carries):
            flags |= CARRY_EMBEDDED
        carry, second = [carry for carry, _ in (*carries, *[(NOTHING, False)] * MAX_CARRIED)][:2]
        flags |= CARRY_TWO if second != NOTHING else 0
        if op.normed:
            carry = self.normalised(op, nth)
            flags |= KEEP_NORMED
        kept = self.keep(op, out_rows)
        if self.is_ranked(op):
            self.logits_at = kept
        for out in op.outs:
            self.made[out] = _Made(dst, generation, out_rows, streams, kept)
            self.forms[out] = epilogue.publishes
        if len(op.outs) > 1:
            self.locate_outs(op, dst, generation, 1 if epilogue.publishes == "numbers" else 2)
        for sm, queue in enumerate(self.queues):
            first, last = share(rows, streams, sm, self.num_sms)
            if first == last:
                continue
            before = 0 if by_rows else first // streams * UNIT_ROWS
            queue.append(
                RowLinear(
                    opcode=number,
                    name=op.name,
                    generation=generation,
                    matrix=matrix,
                    weight_row=starts[0] + before,
                    pair_row=starts[1] + before if streams == 2 else second,
                    num_units=last - first,
                    num_tiles_k=tiles_k(columns),
                    src=x.first,
                    num_src_words=columns // 2,
                    flag_delta=generation - x.generation,
                    norm=self.norm_at(op),
                    bias=self.placed.bias(op.streams, padded=True),
                    dst=dst,
                    row0=first * UNIT_ROWS,
                    num_rows=limit,
                    flags=flags,
                    keep=kept,
                    carry=carry,
                )
            )

    def length(self, op: FusedContraction) -> int:
        """Elements of x."""
        if op.experts and op.experts.by == "columns":
            assert self.experts is not None
            return self.experts.columns
        return self.placed.columns[op.streams[0].weights[0]]

    def weight_rows(self, op: FusedContraction) -> tuple[int, list[int]]:
        """The number of the matrix of an op's weights, and where each stream begins there."""
        matrices = self.placed.matrices
        block = self.expert_matrix() if op.experts and op.experts.by == "columns" else None
        if block is not None:
            return len(matrices), self.placed.starts(op.name, op.streams, block)
        matrix = [m.columns for m in matrices].index(self.length(op))
        return matrix, self.placed.starts(op.name, op.streams, matrices[matrix])

    def of_x(self, op: FusedContraction | FusedPointwise) -> _Made:
        """Where x lies; nowhere if it is the given row, which is looked up."""
        if op.x in self.made:
            return self.made[op.x]
        if op.x != self.entry:
            raise unfit(f"{op.name!r} of {op.x!r}, which no op publishes")
        return _Made(0, 0, self.hidden(), 1, NOTHING)

    def locate_outs(self, op: FusedContraction, dst: int, generation: int, rows: int) -> None:
        """Where each of several results lies, one behind the other, so many rows a word."""
        for out, weight in zip(op.outs, op.streams[0].weights, strict=True):
            self.made[out] = _Made(dst, generation, 0, 0, NOTHING)
            dst += self.placed.rows_of(weight) // rows

    def norm_at(self, op: FusedContraction) -> int:
        """Offset of the norm's weight; the bias of a layer norm lies behind it."""
        if op.norm is None:
            return NOTHING
        if op.norm.kind == "layer_norm":
            self.placed.require_next(op.norm.weight, op.norm.bias)
        return self.placed.vector(op.norm.weight)

    def carried(self, op: str, name: str, rows: int, streams: int) -> tuple[int, bool]:
        """Where an operand of `op` lies that the SM keeps, and whether it is the given row."""
        made = self.made.get(name)
        if name == self.entry and (made is None or made.kept == NOTHING):
            if self.hidden() != rows:
                raise unfit(f"{op!r}, which takes {name!r} of another size")
            return NOTHING, True
        if made is None or made.kept == NOTHING or (made.rows, made.streams) != (rows, streams):
            raise unfit(f"{op!r}, which takes {name!r} from other SMs")
        return made.kept, False

    def add_pointwise(self, nth: int, op: FusedPointwise) -> None:
        """The rows of its result, shared out as those of a matrix."""
        rows = self.elements(op.out)
        x = self.of_x(op) if op.x else _Made(0, 0, 0, 1, NOTHING)
        is_given = bool(op.x) and op.x not in self.made
        number = self.formula_number(op)
        formula = self.formulas[number]
        size = {"nothing": 0, "numbers": rows, "pairs": rows // 2}[formula.publishes]
        kind, generation = self.turn(self.classes[nth])
        dst = self.reserve(kind, size)
        carries = [
            self.carried(op.name, name, rows, 1) for name in op.operands[: formula.num_carried]
        ]
        embedded = any(given for _, given in carries)
        carry, second = [carry for carry, _ in (*carries, *[(NOTHING, False)] * MAX_CARRIED)][:2]
        norm = op.norm
        flags = (FROM_EMBEDDING if is_given else 0) | (CARRY_EMBEDDED if embedded else 0)
        flags |= BIASED if norm and norm.bias else 0
        table = NOTHING
        if formula.has_table:
            flags |= AT_POSITION if self.tables[op.operands[-1]].ids == self.positions else 0
            table = self.placed.table(self.tables[op.operands[-1]].table)
        if norm and norm.bias:
            self.placed.require_next(norm.weight, norm.bias)
        weight = self.placed.vector(norm.weight) if norm and norm.weight else NOTHING
        kept = self.keep(op, rows)
        self.made[op.out] = _Made(dst, generation, rows, 1, kept)
        for sm, queue in enumerate(self.queues):
            first, last = share(rows, 1, sm, self.num_sms)
            if first == last:
                continue
            queue.append(
                RowPointwise(
                    name=op.name,
                    generation=generation,
                    number=number,
                    num_units=last - first,
                    src=x.first,
                    num_src_words=0 if not op.x else rows if formula.numbers else rows // 2,
                    flag_delta=generation - x.generation if op.x else 0,
                    flags=flags,
                    norm=weight,
                    eps=norm.eps if norm else 0.0,
                    dst=dst,
                    row0=first * UNIT_ROWS,
                    num_rows=rows,
                    keep=kept,
                    carry=carry,
                    second=second,
                    table=table,
                )
            )

    def add_gather(self, nth: int, op: FusedGather) -> None:
        """All columns lie where ranks have pushed them. What is taken otherwise than by polling is
        kept by the SMs whose rows it is.
        """
        part, rows, form = self.made.get(op.x), self.elements(op.out), self.forms.get(op.x)
        made_by = {out for one in self.contractions() for out in one.outs}
        if part is None or form is None or op.x not in made_by:
            raise unfit(f"{op.name!r} of {op.x!r}, which is no contraction's result")
        size = self.elements(op.x) // (2 if form == "pairs" else 1)
        kept = self.keep(op, rows)
        made = _Made(part.first - self.team_rank * size, part.generation, rows, 1, kept)
        self.made[op.out], self.forms[op.out] = made, form
        if kept != NOTHING:
            self.add_copies(op.out, made, "heard" if self.hears_all else "copy")

    def add_copies(self, name: str, made: _Made, norm: str) -> None:
        """Each SM keeps its rows of what lies in flagged words. norm: as of a RowFormula."""
        formula = RowFormula(
            norm=norm,
            numbers=self.forms.get(name, "pairs") == "numbers",
            formula=IDENTITY,
            publishes="nothing",
            num_carried=0,
            has_table=False,
        )
        if formula not in self.formulas:
            self.formulas.append(formula)
        if -(-num_units(made.rows) // self.num_sms) * UNIT_ROWS > MAX_ROWS:
            raise unfit(f"{name!r} of {made.rows} elements")
        for sm, queue in enumerate(self.queues):
            first, last = share(made.rows, 1, sm, self.num_sms)
            if first == last:
                continue
            queue.append(
                RowPointwise(
                    name=f"{name} kept",
                    generation=made.generation,
                    number=self.formulas.index(formula),
                    num_units=last - first,
                    src=made.first,
                    num_src_words=-(-made.rows // (1 if formula.numbers else 2)),
                    flag_delta=0,
                    flags=0,
                    norm=NOTHING,
                    eps=0.0,
                    dst=0,
                    row0=first * UNIT_ROWS,
                    num_rows=made.rows,
                    keep=made.kept,
                    carry=NOTHING,
                    second=NOTHING,
                    table=NOTHING,
                )
            )

    def formula_number(self, op: FusedPointwise) -> int:
        """Its formula among those of the segment, as it is told apart by kernels."""
        rows = self.elements(op.out)
        carried, table = split_operands(op, self.tables, self.elements)
        if op.norm and op.length != rows:
            raise unfit(f"{op.name!r}, which normalises {op.length} of {rows} elements together")
        most = -(-num_units(rows) // self.num_sms) * UNIT_ROWS
        if rows % POLLED_WORDS or most > MAX_ROWS:
            raise unfit(f"{op.name!r} of {rows} elements")
        form = self.forms.get(op.x, "pairs")
        publishes = self.publishes(op.name, (op.out,))
        self.forms[op.out] = publishes
        found = RowFormula(
            norm=op.norm.kind if op.norm else "",
            numbers=form == "numbers",
            formula=op.formula,
            publishes=publishes,
            num_carried=len(carried),
            has_table=table is not None,
        )
        if found not in self.formulas:
            self.formulas.append(found)
        return self.formulas.index(found)

    def normalised(self, op: FusedContraction, nth: int) -> int:
        """Where each SM keeps its rows of x, which it normalises there: it must have a part of the
        op, and x must be wanted by nobody afterwards.
        """
        x = self.of_x(op)
        units, mine = num_units(x.rows), rows_of(op, self.placed)
        if x.kept == NOTHING or x.streams != 1 or op.operands or self.is_taken(op.x, nth):
            raise unfit(f"{op.name!r}, which normalises {op.x!r} and others take that")
        if units > MAX_NORMED_UNITS * self.num_sms or any(
            share(x.rows, 1, sm, self.num_sms)[0] < share(x.rows, 1, sm, self.num_sms)[1]
            and share(mine, len(op.streams), sm, self.num_sms)[0]
            == share(mine, len(op.streams), sm, self.num_sms)[1]
            for sm in range(self.num_sms)
        ):
            raise unfit(f"{op.name!r}, of which SMs that keep rows of {op.x!r} have none")
        self.made[op.normed] = _Made(0, 0, x.rows, x.streams, x.kept)
        return x.kept

    def choice_vocab(self) -> int:
        assert self.choice is not None
        return self.choice.vocab

    @property
    def slots(self) -> int:
        """Of a rank's logits where all ranks have those of all: a whole number of units."""
        return UNIT_ROWS * num_units(self.vocab)

    def samples_from_all(self, sampler: FusedSample | None) -> bool:
        """Whether a rank needs the logits of others: limits are those of all tokens."""
        return sampler is not None and sampler.limits != "given" and self.num_ranks > 1

    def reserve_logits(self, rows: int) -> int:
        """First word of this rank's logits where all ranks exchange them, in whole units."""
        sampler = self.choice.sampler if self.choice else None
        if not self.samples_from_all(sampler):
            return self.num_words
        slots = UNIT_ROWS * num_units(rows)
        return self.reserve("logits", self.num_ranks * slots) + self.team_rank * slots

    def reserve_choice(self, head: FusedChoice) -> None:
        """best: of all ranks, or of one that samples for itself."""
        ranks = 1 if self.samples_from_all(head.sampler) else self.num_ranks
        self.reserve("best", 2 * self.num_sms * ranks)

    def head_rows(self, sampler: FusedSample | None) -> int:
        """Logits from which one SM chooses, at most; two a thread where it polls them."""
        if not self.samples_from_all(sampler):
            return UNIT_ROWS * -(-num_units(self.vocab) // self.num_sms)
        units = self.num_ranks * num_units(self.vocab)
        return max(2 * MAX_SMS, UNIT_ROWS * -(-units // self.num_sms))

    def add_choice(self, op: FusedChoice) -> None:
        """Each SM samples from what it has of the logits, or from as large a part of all."""
        if op.sampler is None:
            return
        limit = min(self.vocab, max(0, op.vocab - self.team_rank * self.vocab))
        rows, src, vocab = self.vocab, 0, 0
        if self.samples_from_all(op.sampler):
            rows = limit = self.num_ranks * self.slots
            src, vocab = self.firsts["logits"], self.vocab
        source = self.made[op.source]
        dst = self.reserve("sample", num_sample_words(op.sampler, self.head_rows(op.sampler)))
        for sm, queue in enumerate(self.queues):
            first, last = share(rows, 1, sm, self.num_sms)
            queue.append(
                RowSample(
                    name=op.name,
                    generation=source.generation,
                    row0=first * UNIT_ROWS,
                    num_rows=min(last * UNIT_ROWS, limit),
                    src=src,
                    vocab=vocab,
                    dst=dst,
                    logits=self.logits_at,
                )
            )

    def add_barrier(self, nth: int) -> None:
        """All SMs wait for each other, in mode "op"."""
        op = self.fused[nth]
        if self.mode == "op" and not isinstance(op, FusedEmbedding):
            kind, generation = self.turn(f"barrier after {self.classes[nth]}")
            dst = self.reserve(kind, 2 * self.num_sms)
            for queue in self.queues:
                queue.append(
                    RowBarrier(
                        name=op.name, generation=generation, dst=dst, num_words=2 * self.num_sms
                    )
                )

    def add_routing(self, op: FusedRouting) -> None:
        """Each SM that has tiles of the experts chooses them for itself."""
        scores = self.made.get(op.scores)
        if scores is None or scores.rows != op.num_experts:
            raise unfit(f"{op.name!r}, whose scores are not one contraction's")
        users = [
            one for one in self.contractions() if one.experts and one.experts.routing == op.name
        ]
        for sm, queue in enumerate(self.queues):
            shares = (
                share(rows_of(one, self.placed), len(one.streams), sm, self.num_sms)
                for one in users
            )
            if any(first < last for first, last in shares):
                queue.append(
                    RowRoute(
                        name=op.name,
                        generation=scores.generation,
                        src=scores.first,
                        num_words=op.num_experts,
                    )
                )

    def find_lightest(self) -> None:
        """SMs in the order of the tiles that contractions give them: cached keys and values, and
        the work on them, go to those with the fewest.
        """
        load = [0] * self.num_sms
        for op in self.fused:
            if isinstance(op, FusedContraction) and not self.is_ranked(op):
                rows = rows_of(op, self.placed)
                tiles = tiles_k(self.length(op))
                for sm in range(self.num_sms):
                    first, last = share(rows, len(op.streams), sm, self.num_sms)
                    load[sm] += (last - first) * tiles
        self.lightest = sorted(range(self.num_sms), key=lambda sm: (load[sm], sm))

    def add_attention(self, nth: int, op: FusedAttention) -> None:
        """Splits of each kv head's queries, then a sum a query head, on the lightest SMs."""
        s = self.attention
        assert s is not None
        source = self.made.get(self.storage(op.q))
        at = [self.first_word(name) for name in (op.q, op.k, op.v)]
        sizes = (s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim)
        if source is None or -1 in at:
            raise unfit(f"{op.name!r}, whose queries, keys and values no op publishes")
        if not s.apart and at != [at[0], at[0] + sizes[0], at[0] + sizes[0] + sizes[1]]:
            raise unfit(f"{op.name!r}, whose queries, keys and values lie apart, others do not")
        kind, generation = self.turn(self.classes[nth])
        sources = {self.made[self.storage(name)].generation for name in (op.q, op.k, op.v)}
        if sources != {generation}:
            raise unfit(f"{op.name!r}, which is not of the generation of its queries")
        splits = self.max_splits
        words = s.num_heads * splits * (s.head_dim + PARTIAL_EXTRA)
        partial = self.reserve(f"partial {kind}", words)
        dst = self.reserve(kind, s.num_heads * s.head_dim // 2)
        self.made[op.out] = _Made(dst, generation, s.num_heads * s.head_dim, 0, NOTHING)
        window = op.window or NO_WINDOW
        tasks = product(range(splits), range(s.num_kv_heads), range(s.num_parts))
        for number, (split, head, part) in enumerate(tasks):
            self.queues[self.lightest[number % self.num_sms]].append(
                RowAttention(
                    name=op.name,
                    generation=generation,
                    k_row=self.cache_row(op.k_cache, head),
                    v_row=self.cache_row(op.v_cache, head),
                    head=head,
                    query0=s.first_query(head, part),
                    window=window,
                    split=split,
                    max_splits=splits,
                    src=at[0],
                    k_src=at[1],
                    v_src=at[2],
                    partial=partial,
                    q_norm=self.placed.vector(op.q_norm.weight) if op.q_norm else NOTHING,
                    k_norm=self.placed.vector(op.k_norm.weight) if op.k_norm else NOTHING,
                    table=self.placed.table(op.bias, "f32") if op.bias else 0,
                )
            )
        for head in range(s.num_heads):
            sm = self.lightest[-1 - head % self.num_sms]
            self.queues[sm].append(
                RowCombine(
                    name=op.name,
                    generation=generation,
                    head=head,
                    window=window,
                    max_splits=splits,
                    partial=partial,
                    dst=dst,
                )
            )

    def storage(self, name: str) -> str:
        return self.shown[name].tensor if name in self.shown else name

    def first_word(self, name: str) -> int:
        """Of a tensor or a part of one that is published as numbers; -1 if none is."""
        made = self.made.get(self.storage(name))
        first = self.shown[name].first if name in self.shown else 0
        return made.first + first if made else -1

    @property
    def max_splits(self) -> int:
        assert self.attention is not None
        num_tasks = self.attention.num_kv_heads * self.attention.num_parts
        return max(1, min(MAX_SPLITS, self.num_sms // num_tasks))

    def cache_row(self, name: str, head: int) -> int:
        assert self.attention is not None
        row_bytes = self.attention.head_dim * ITEM_BYTES
        row, rest = divmod(self.states.offset(name), row_bytes)
        if rest:
            raise unfit(f"cache {name!r} between rows of {row_bytes} bytes")
        return row + head * self.attention.max_context


def num_sample_words(sampler: FusedSample, head_rows: int) -> int:
    """Flagged words in which SMs exchange what they need to find the limits of a sample, each
    having at most head_rows logits: a chunk of maxima, then as many as those may fill; or those of
    a search.
    """
    chunks = {"given": 0, "candidates": 2 + head_rows // SAMPLE_CHUNK, "all": SEARCH_CHUNKS}
    return chunks[sampler.limits] * SAMPLE_CHUNK * MAX_SMS
