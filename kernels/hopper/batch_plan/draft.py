"""Queues of the kernel of several rows, as far as they are filled, and who takes what how.

In: a segment, its fused ops, the layouts of its arenas. queues.py goes through the ops; for each, a
function of a file here adds instructions to the draft. Torch-free. Next on the walk: results.py.
"""

import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field, replace

from distmega.errors import counted
from distmega.kernels.hopper.batch_plan.experts import NUM_ZERO_CHUNKS, batch_expert_shape
from distmega.kernels.hopper.batch_plan.types import (
    BatchEpilogue,
    BatchFormula,
    Given,
    first_word,
    is_limited,
)
from distmega.kernels.hopper.batch_plan.words import (
    BATCH,
    BEST_WORDS,
    MAX_LENGTH,
    READY_WORDS,
    BatchInstruction,
)
from distmega.kernels.hopper.plan.matrices import Weights, rows_of
from distmega.kernels.hopper.plan.pointwise import in_order
from distmega.kernels.hopper.plan.segment import find_agreement
from distmega.kernels.hopper.plan.types import (
    HEAD_DIMS,
    ITEM_BYTES,
    ROW_MULTIPLE,
    AttentionShape,
    Buffer,
    ExpertShape,
    unfit,
)
from distmega.kernels.hopper.plan.words import MAX_SMS, NOTHING
from distmega.kernels.runtime.arena import ArenaLayout
from distmega.kernels.tasks.fuse import (
    Fused,
    FusedAttention,
    FusedChoice,
    FusedContraction,
    FusedEmbedding,
    FusedGather,
    FusedPointwise,
    FusedRouting,
    FusedRowAttention,
    InputNorm,
    taken_by,
)
from distmega.program.types import Program

REPORTED_WORDS = 2**24
"""Flagged words that a report of a hang can name."""
FOREVER = 2**30
"""When an output is read last."""

Form = tuple[str, InputNorm | None]
"""A tensor as linears take it: after a norm, or as it is."""
Maker = FusedContraction | FusedAttention | FusedRowAttention | FusedPointwise | FusedGather
"""What gives a tensor of rows."""
OTHER_MAKERS = FusedAttention | FusedRowAttention | FusedPointwise | FusedGather
"""All but contractions, which give several."""


def given_by(op: Fused) -> tuple[str, ...]:
    """Tensors of rows that an op gives."""
    match op:
        case FusedContraction():
            return (*op.outs, op.normed) if op.normed else op.outs
        case FusedAttention() | FusedRowAttention() | FusedPointwise() | FusedGather():
            return (op.out,)
    return ()


def rows_like(op: Fused) -> tuple[str, ...]:
    """Those that it takes as many rows of."""
    return (op.q.tensor,) if isinstance(op, FusedRowAttention) else taken_by(op)


@dataclass(slots=True)
class Pool:
    """Places of one memory that tensors take in turn. last: when each is read last."""

    size: int = 0
    known: dict[object, list[int]] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)

    def take(self, kind: object, num: int, now: int, last: int, reused: int = NOTHING) -> int:
        """First of `num` elements for a tensor written at `now` and read until `last`: `reused`,
        or what a tensor of the same kind had that nobody reads any more, or behind all.
        """
        known = self.known.setdefault((kind, num), [])
        first = next((one for one in known if self.last[one] < now), NOTHING)
        if reused in known:
            first = reused
        if first == NOTHING:
            first = self.size
            self.size += num
            known.append(first)
        self.last[first] = max(last, now)
        return first


@dataclass
class BatchDraft:
    """What is known of a segment and its queues; time is the number of the op, -1 of the rows that
    come in.
    """

    segment: Program
    fused: tuple[Fused, ...]
    placed: Weights
    weights: ArenaLayout
    states: ArenaLayout
    num_sms: int
    team_rank: int
    divided: Container[str]
    queues: list[list[BatchInstruction]] = field(default_factory=list)
    chunks: Pool = field(default_factory=Pool)
    numbers: Pool = field(default_factory=Pool)
    slots: Pool = field(default_factory=Pool)
    chunk_of: dict[Form, int] = field(default_factory=dict)
    slot_of: dict[Form, int] = field(default_factory=dict)
    """Where the squares lie of what is written without the factor of its norm."""
    number_of: dict[str, int] = field(default_factory=dict)
    makers: dict[str, Maker] = field(default_factory=dict)
    normed: dict[Form, str] = field(default_factory=dict)
    """Forms that are also taken as float32, by the names that they have there."""
    forms: dict[str, dict[InputNorm | None, int]] = field(default_factory=dict)
    """In which forms linears take a tensor, and when last."""
    taken: dict[str, int] = field(default_factory=dict)
    """When a tensor is taken last as float32."""
    symmetric: dict[str, int] = field(default_factory=dict)
    """First flagged word of each buffer that ranks exchange."""
    buffers: list[Buffer] = field(default_factory=list)
    summed: list[int] = field(default_factory=list)
    """Rows of each sum over ranks, in order, gathers among them."""
    num_summed: int = 0
    epilogues: list[BatchEpilogue] = field(default_factory=list)
    gathers: list[BatchEpilogue] = field(default_factory=list)
    formulas: list[BatchFormula] = field(default_factory=list)
    tables: Mapping[str, FusedEmbedding] = field(default_factory=dict)
    """Embeddings besides the one whose rows come in, by what they give."""
    given: dict[object, Given] = field(default_factory=dict)
    """What the runner writes before each launch, by what asks for it."""
    others: tuple[str, ...] = ()
    """Inputs of rows besides those that come in."""
    rows: dict[str, int] = field(default_factory=dict)
    """Of each tensor of rows: how many, where that is known."""
    positions: str = ""
    wide_norms: bool = False
    num_ranks: int = 1
    shares_rows: bool = False
    """Whether ranks add up the rows that come in: they have parts of a table that others need; or
    it is an input, and a step's only sum would follow on itself, with nothing heard in between.
    """
    embedding: FusedEmbedding | None = None
    choice: FusedChoice | None = None
    attention: AttentionShape | None = None
    experts: ExpertShape | None = None
    num_choices: int = 0
    entry: str = ""
    eps: float = 0.0
    batch: int = 0
    rank_logits: int = 0
    most_rows: int = BATCH
    """Rows that the segment may have."""

    @property
    def splits(self) -> bool:
        """Whether products are instructions of their own, split along k."""
        return self.batch > BATCH

    # what the segment is

    def inspect(self) -> None:
        """What all ops share: ranks, rows, extents of attention, the embedding or the input."""
        found = find_agreement(
            self.segment, self.fused, max_rows=self.most_rows, head_dims=HEAD_DIMS
        )
        self.num_ranks, self.embedding, self.entry = found.num_ranks, found.embedding, found.entry
        self.choice, self.attention, self.eps = found.choice, found.attention, found.eps
        self.batch, self.others = found.rows, found.others
        self.count_rows()
        if self.splits and self.num_ranks > 1:
            raise unfit(f"{counted(self.batch, 'row')} on {counted(self.num_ranks, 'rank')}")
        if self.splits and self.choice is not None and self.choice.sampler is not None:
            raise unfit(f"samples of {counted(self.batch, 'sequence')}")
        lengths = self.placed.columns.values()
        if any(length % ROW_MULTIPLE or length > MAX_LENGTH for length in lengths):
            raise unfit(f"rows of {sorted(set(self.placed.columns.values()))} elements")
        self.check_caches()
        self.tables, self.positions = found.tables, found.positions
        self.fused = tuple(in_order(op, self.tables) for op in self.fused)
        self.wide_norms = self.placed.has_wide_norms(self.fused)
        if self.attention:
            made = {op.outs for op in self.fused if isinstance(op, FusedContraction)}
            attended = [op for op in self.fused if isinstance(op, FusedAttention)]
            are_joined = all((op.q, op.k, op.v) in made for op in attended)
            self.attention = replace(self.attention, apart=not are_joined)
        self.experts = batch_expert_shape(self.fused, self.weights)
        if self.splits and self.experts:
            raise unfit(f"experts of {counted(self.batch, 'row')}")
        self.chunks.size = NUM_ZERO_CHUNKS if self.experts else 0
        self.summed = [
            self.elements(op.out) if isinstance(op, FusedGather) else rows_of(op, self.placed)
            for op in self.fused
            if isinstance(op, FusedContraction | FusedGather) and op.num_ranks > 1
        ]
        is_alone = len(self.summed) == 1 and self.choice is None and self.embedding is None
        if is_alone and self.entry in self.divided:
            raise unfit(f"a sum over ranks alone, of input {self.entry!r} that they have parts of")
        is_shared = self.embedding is not None and self.embedding.num_ranks > 1
        self.shares_rows = self.num_ranks > 1 and (is_shared or is_alone)
        if self.shares_rows:
            self.summed.insert(0, self.elements(self.entry))

    def check_caches(self) -> None:
        """Refuses caches of other rows than the segment has."""
        tensors = self.segment.tensor_map()
        for op in self.fused:
            if isinstance(op, FusedAttention) and self.attention:
                cache = tensors[op.k_cache].shape
                own = self.batch, self.attention.num_kv_heads
                forms = (own, own[1:]) if self.batch == 1 else (own,)  # one row may need no dim
                if cache[:-2] not in forms:
                    found = f"{op.name!r} of {counted(self.batch, 'row')} with caches {list(cache)}"
                    raise unfit(f"{found}, which is not one a row")
                row_bytes = self.attention.head_dim * ITEM_BYTES
                if any(self.states.offset(name) % row_bytes for name in (op.k_cache, op.v_cache)):
                    raise unfit(f"{op.name!r} with caches between rows of {row_bytes} bytes")

    def count_rows(self) -> None:
        """Rows of each tensor: those of inputs, then those of what ops take."""
        tensors = self.segment.tensor_map()
        for name in (self.entry, *self.others):
            self.rows[name] = math.prod(tensors[name].shape[:-1])
        for op in self.fused:
            if isinstance(op, FusedEmbedding):
                self.rows[op.out] = tensors[op.ids].num_elements
            found = {self.rows[name] for name in rows_like(op) if name in self.rows}
            if isinstance(op, FusedRowAttention):
                found.add(op.num_sequences * op.num_rows)
            if len(found) > 1:
                raise unfit(f"{op.name!r}, which takes {sorted(found)} rows together")
            self.rows |= dict.fromkeys(given_by(op), *(found or {self.batch}))
        fewer = {name for name, num in self.rows.items() if num != self.batch}
        if fewer and (self.choice or self.attention):
            raise unfit(f"{sorted(fewer)} of other rows than {self.batch}")

    def elements(self, name: str) -> int:
        """Of a row of a tensor."""
        rows = self.rows.get(name, self.batch)
        return self.segment.tensor_map()[name].num_elements // rows

    def find_uses(self) -> None:
        """Who gives each tensor, in which forms it is taken, and when last."""
        for op in self.fused:
            if isinstance(op, FusedContraction):
                self.makers |= dict.fromkeys(op.outs, op)
                if op.normed:
                    self.normed[op.x, op.norm] = op.normed
            elif isinstance(op, OTHER_MAKERS):
                self.makers[op.out] = op
        for now, op in enumerate(self.fused):
            if isinstance(op, FusedContraction):
                self.forms.setdefault(op.x, {})[op.norm] = now
                self.taken |= dict.fromkeys(op.operands, now)
            elif isinstance(op, OTHER_MAKERS):
                numbers = [name for name in taken_by(op) if name not in self.tables]
                self.taken |= dict.fromkeys(numbers, now)
        for now, scores in self.scores_taken():
            self.taken[scores] = max(now, self.taken.get(scores, 0))
        own = {self.choice.chosen, self.choice.logits} if self.choice else set()
        for name in self.segment.outputs:
            if name not in own:
                self.taken[name] = FOREVER
        for now, op in enumerate(self.fused):
            if isinstance(op, FusedContraction) and self.is_made_apart(op.x, op.norm):
                self.taken[op.x] = max(now, self.taken.get(op.x, 0))

    def scores_taken(self) -> Iterator[tuple[int, str]]:
        """Scores that experts are chosen from, and when: with their first matrices."""
        scores = {op.name: op.scores for op in self.fused if isinstance(op, FusedRouting)}
        for now, op in enumerate(self.fused):
            if isinstance(op, FusedContraction) and op.experts and op.experts.by == "rows":
                yield now, scores[op.experts.routing]

    def maker(self, name: str) -> Maker | None:
        """The op that gives a tensor, None of the rows that come in."""
        if name not in self.makers and name not in (self.entry, *self.others):
            raise unfit(f"{name!r}, which no instruction gives")
        return self.makers.get(name)

    def published(self, name: str) -> tuple[InputNorm | None, bool]:
        """The form in which its op gives a tensor to linears, and whether it gives one at all."""
        forms = self.forms.get(name, {})
        if name in self.others:  # they lie as numbers
            return None, False
        if None in forms:
            return None, True
        maker = self.maker(name)
        folds = maker is None or isinstance(maker, FusedPointwise | FusedGather)
        folds |= isinstance(maker, FusedContraction) and len(maker.streams) == 1
        for norm in forms if folds else ():
            if norm and norm.kind == "rms_norm" and (name, norm) not in self.normed:
                return norm, True
        return None, False

    def is_made_apart(self, name: str, norm: InputNorm | None) -> bool:
        """Whether an instruction of its own makes this form."""
        return self.published(name) != (norm, True) or (name, norm) in self.normed

    # buffers that ranks exchange

    def reserve(self) -> None:
        """Room behind the events for what ranks exchange: their most likely ids, before a step
        and behind the last one, and their parts of sums. In the order in which a step waits for
        them, since of waits with one flag the lowest word is reported (ptx/spins.py). For samples
        within limits, in place of the ids, what BatchLogits names.
        """
        choice, ranks = self.choice, self.num_ranks
        gathers = choice is not None and is_limited(choice.sampler)
        sizes = {"best": 2 * ranks * BEST_WORDS} if choice and not gathers else {}
        for number, rows in enumerate(self.summed):
            name = self.parts_name(number)
            sizes[name] = max(sizes.get(name, 0), ranks * rows * BATCH)
        if choice and gathers:
            sizes |= {
                "ready_flags": ranks * READY_WORDS,
                "row_maxima": ranks * MAX_SMS * BATCH // 2,
            }
            sizes["logits"] = choice.num_logits * BATCH // 2
        word = first_word(self.num_instructions())
        for name, size in sizes.items() if ranks > 1 else ():
            size = -(-size // 16) * 16
            self.symmetric[name] = word
            self.buffers.append(Buffer(name=name, first=word, num_words=size))
            word += size
        if word >= REPORTED_WORDS:
            raise unfit(f"sums over ranks of {self.summed} rows")

    def num_instructions(self) -> int:
        """On each SM: the rows that come in, ops, other forms, a sample within limits."""
        made = {
            (op.x, op.norm)
            for op in self.fused
            if isinstance(op, FusedContraction) and self.is_made_apart(op.x, op.norm)
        }
        kinds = FusedContraction | OTHER_MAKERS
        ops = [op for op in self.fused if isinstance(op, kinds)]
        samples = self.choice is not None and is_limited(self.choice.sampler)
        products = [op for op in ops if isinstance(op, FusedContraction)] if self.splits else []
        prepared = [op for op in ops if isinstance(op, FusedRowAttention) and op.prepares]
        return 1 + sum(map(len, (ops, made, products, prepared))) + int(samples)

    def parts_name(self, number: int) -> str:
        """The buffer of a sum: of two in turn, or its own for a last one before another step."""
        num = len(self.summed)
        is_odd_one = self.choice is None and num % 2 == 1 and number == num - 1 > 0
        return f"parts {2 if is_odd_one else number % 2}"

    def next_parts(self, rows: int) -> dict[str, int]:
        """Where the next sum over ranks has its parts."""
        parts = self.symmetric[self.parts_name(self.num_summed)]
        self.num_summed += 1
        return {"parts": parts, "own_part": parts + self.team_rank * rows * BATCH}
