"""Queues of the kernel of 2 to 16 rows: the same instructions on every SM, each for its own rows.

In: fused ops (tasks/fuse/) of that many sequences or rows, in any order that follows their data,
and the layouts of the weight and state arenas. Out: a BatchQueues. Torch-free. Next on the walk:
batch/runner.py.

Every SM takes part in every instruction, if only to count up its event, and waits for all SMs at
the one before. So a buffer may be written as soon as an instruction before has read it last, and
one is taken again by tensors that are made alike. A result is bf16 where linears take it, and
float32 where other ops or the caller do. The weight of an rms norm is multiplied in by whoever
writes x, its factor by whoever reads it; what linears take in another form, as after a layer norm,
is an instruction of its own.

Where ranks share the program, all have the same queues but for the vocabulary, and what is summed
over ranks goes through two buffers in turn: an SM's next push into the same one comes after it has
received a sum from all ranks, which they began after all of their SMs had read this one. Where no
choice of a token lies between the last sum of a step and the first of the next, the last one has a
buffer of its own; where a step has one sum alone, ranks add up the rows that come in, too. proof.py
proves this and the rest for each program.

Experts: a BatchExperts chooses them for all rows, on each SM by itself from the same scores, and
does the first matrices of those that some row chose; a linear with EXPERT_COLUMNS follows, for
which these lie side by side. Room is there for as many as rows can choose. Where there are experts
chunk 0 of the activations stays zero, in place of rows that did not choose one.

Samples within limits need all logits of a sequence: each SM, done with the head, writes its own
into every rank's memory as plain numbers, then, behind a fence, two flagged words that tell that
rank so. The sample waits for these words of all SMs of all ranks in place of the head's event. They
stand in for the most likely tokens above, too: an SM sends them when it is past all sums of the
step. No one overwrites logits that another still needs: the next step's come behind its embedding,
to which each rank adds its part only once all of its own SMs are done with the sample.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from distmega.kernels.hopper.batch_plan.experts import NUM_ZERO_CHUNKS, batch_expert_shape
from distmega.kernels.hopper.batch_plan.proof import CHUNK, find_batch_hazard
from distmega.kernels.hopper.batch_plan.types import (
    BatchEpilogue,
    BatchEpilogues,
    BatchFormula,
    BatchFormulas,
    BatchQueues,
    first_word,
    is_limited,
)
from distmega.kernels.hopper.batch_plan.words import (
    BATCH,
    BEST_WORDS,
    BLOCK_MASK,
    EXPERT_COLUMNS,
    EXPERT_ROWS,
    MAX_SLOTS,
    NORM_KINDS,
    NORMED,
    NOTHING,
    NUMBERS,
    PAIRED,
    READY_WORDS,
    BatchAttention,
    BatchEmbed,
    BatchExperts,
    BatchGather,
    BatchHead,
    BatchInstruction,
    BatchLinear,
    BatchNorm,
    BatchPointwise,
    BatchSample,
)
from distmega.kernels.hopper.plan.matrices import Weights, num_units, rows_of, share, tiles_k
from distmega.kernels.hopper.plan.pointwise import MAX_CARRIED, in_order, split_operands
from distmega.kernels.hopper.plan.segment import find_agreement
from distmega.kernels.hopper.plan.types import (
    HEAD_DIMS,
    ITEM_BYTES,
    ROW_MULTIPLE,
    AttentionShape,
    Buffer,
    ExpertShape,
    Kept,
    unfit,
)
from distmega.kernels.hopper.plan.words import MAX_EPILOGUES, MAX_SMS, NO_WINDOW, UNIT_ROWS
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
    InputNorm,
    WeightStream,
    first_that_fits,
)
from distmega.program.types import Program

REPORTED_WORDS = 2**24
"""Flagged words that a report of a hang can name."""
FOREVER = 2**30
"""When an output is read last."""

Form = tuple[str, InputNorm | None]
"""A tensor as linears take it: after a norm, or as it is."""
Maker = FusedContraction | FusedAttention | FusedPointwise | FusedGather
"""What gives a tensor of rows."""


def build_batch_queues(
    segment: Program,
    weights: ArenaLayout,
    states: ArenaLayout,
    num_sms: int,
    team_rank: int = 0,
    divided: Container[str] = (),
) -> BatchQueues:
    """Queues for `num_sms` SMs of rank `team_rank` of its team. divided: tensors of which each rank
    has another part. UnsupportedError where the kernel can't do the segment.
    """
    placed = Weights(segment, weights)

    def build(found: tuple[Fused, ...]) -> BatchQueues:
        fused = tuple(apart(found, segment.outputs))
        queues = _BatchBuilder(
            segment, fused, placed, weights, states, min(num_sms, MAX_SMS), team_rank, divided
        ).build()
        hazard = find_batch_hazard(queues, fused)
        if hazard:
            raise unfit(f"a segment where {hazard}")
        return queues

    return first_that_fits(segment, build)


def apart(fused: Sequence[Fused], outputs: Sequence[str] = ()) -> Iterator[Fused]:
    """Contractions side by side as one each, unless attention alone takes their results, and all of
    them, as each attention of the segment does. outputs: of the segment.
    """
    wanted = [(op.q, op.k, op.v) for op in fused if isinstance(op, FusedAttention)]
    made = {op.outs for op in fused if isinstance(op, FusedContraction)}
    others = {name for op in fused if not isinstance(op, FusedAttention) for name in taken_by(op)}
    others.update(outputs)
    are_joined = made.issuperset(wanted) and others.isdisjoint(
        name for ops in wanted for name in ops
    )
    joined = set(wanted) if are_joined else set()
    for op in fused:
        if not isinstance(op, FusedContraction) or len(op.outs) == 1 or op.outs in joined:
            yield op
            continue
        (stream,) = op.streams
        for weight, bias, out in zip(stream.weights, stream.biases, op.outs, strict=True):
            alone = WeightStream(weights=(weight,), biases=(bias,))
            yield replace(op, name=out, streams=(alone,), outs=(out,))


def taken_by(op: Fused) -> tuple[str, ...]:
    """Tensors of rows that an op takes."""
    match op:
        case FusedContraction() | FusedPointwise():
            return (op.x, *op.operands) if op.x else op.operands
        case FusedAttention():
            return op.q, op.k, op.v
        case FusedRouting():
            return (op.scores,)
        case FusedGather():
            return (op.x,)
        case FusedChoice():
            return (op.source,)
    return ()


@dataclass(slots=True)
class _Pool:
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
class _BatchBuilder:
    """Fills the queues op by op; time is the number of the op, -1 of the rows that come in."""

    segment: Program
    fused: tuple[Fused, ...]
    placed: Weights
    weights: ArenaLayout
    states: ArenaLayout
    num_sms: int
    team_rank: int
    divided: Container[str]
    queues: list[list[BatchInstruction]] = field(default_factory=list)
    chunks: _Pool = field(default_factory=_Pool)
    numbers: _Pool = field(default_factory=_Pool)
    slots: _Pool = field(default_factory=_Pool)
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
    vocab: int = 0

    def build(self) -> BatchQueues:
        self.inspect()
        self.find_uses()
        self.position_squares()
        self.epilogues = self.find_epilogues()
        self.queues = [[] for _ in range(self.num_sms)]
        self.reserve()
        self.add_entry()
        for now, op in enumerate(self.fused):
            match op:
                case FusedContraction() if op.experts and op.experts.by == "rows":
                    self.add_experts(now, op)
                case FusedContraction():
                    self.add_contraction(now, op)
                case FusedAttention():
                    self.add_attention(now, op)
                case FusedPointwise():
                    self.add_pointwise(now, op)
                case FusedGather():
                    self.add_gather(now, op)
                case FusedChoice() if is_limited(op.sampler):
                    self.add_sample(op)
        head = self.choice
        attention = next((op for op in self.fused if isinstance(op, FusedAttention)), None)
        first_id = self.team_rank * self.vocab
        return BatchQueues(
            num_ranks=self.num_ranks,
            attention=self.attention,
            epilogues=BatchEpilogues(
                tuple(self.epilogues), self.entry_epilogue(), tuple(self.gathers)
            ),
            formulas=BatchFormulas(tuple(self.formulas)),
            wide_norms=self.wide_norms,
            eps=self.eps,
            matrices=self.placed.matrices,
            queues=tuple(map(tuple, self.queues)),
            batch=self.batch,
            hidden=self.elements(self.entry),
            num_chunks=self.chunks.size,
            num_numbers=BATCH * self.numbers.size,
            num_slots=self.slots.size,
            outputs=self.outputs(),
            sampler=head.sampler if head else None,
            head_rows=UNIT_ROWS * -(-num_units(self.vocab) // self.num_sms),
            vocab=self.vocab,
            logit_rows=self.logit_rows,
            first_id=first_id,
            num_tokens=head.vocab if head else 0,
            buffers=tuple(self.buffers),
            embed=self.embedding.table if self.embedding else self.entry,
            rope_table=attention.table if attention else "",
            tokens=self.embedding.ids if self.embedding else "",
            positions=self.positions,
            token=head.token if head else "",
            logits=head.logits if head else "",
            experts=self.experts,
        )

    # what the segment is

    def inspect(self) -> None:
        """What all ops share: ranks, rows, extents of attention, the embedding or the input."""
        found = find_agreement(self.segment, self.fused, max_rows=BATCH, head_dims=HEAD_DIMS)
        self.num_ranks, self.embedding, self.entry = found.num_ranks, found.embedding, found.entry
        self.choice, self.attention, self.eps = found.choice, found.attention, found.eps
        self.batch = found.rows
        if any(length % ROW_MULTIPLE for length in self.placed.columns.values()):
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
                if cache[:-2] != (self.batch, self.attention.num_kv_heads):
                    found = f"{op.name!r} of {self.batch} tokens with caches {list(cache)}"
                    raise unfit(f"{found}, which is not one a token")
                row_bytes = self.attention.head_dim * ITEM_BYTES
                if any(self.states.offset(name) % row_bytes for name in (op.k_cache, op.v_cache)):
                    raise unfit(f"{op.name!r} with caches between rows of {row_bytes} bytes")

    def elements(self, name: str) -> int:
        """Of a row of a tensor."""
        return self.segment.tensor_map()[name].num_elements // self.batch

    def find_uses(self) -> None:
        """Who gives each tensor, in which forms it is taken, and when last."""
        for op in self.fused:
            if isinstance(op, FusedContraction):
                self.makers |= dict.fromkeys(op.outs, op)
                if op.normed:
                    self.normed[op.x, op.norm] = op.normed
            elif isinstance(op, FusedAttention | FusedPointwise | FusedGather):
                self.makers[op.out] = op
        for now, op in enumerate(self.fused):
            if isinstance(op, FusedContraction):
                self.forms.setdefault(op.x, {})[op.norm] = now
                self.taken |= dict.fromkeys(op.operands, now)
            elif isinstance(op, FusedAttention | FusedPointwise | FusedGather):
                numbers = [name for name in taken_by(op) if name not in self.tables]
                self.taken |= dict.fromkeys(numbers, now)
        for now, scores in self.scores_taken():
            self.taken[scores] = max(now, self.taken.get(scores, 0))
        own = {self.choice.token, self.choice.logits} if self.choice else set()
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
        if name not in self.makers and name != self.entry:
            raise unfit(f"{name!r}, which no instruction gives")
        return self.makers.get(name)

    def published(self, name: str) -> tuple[InputNorm | None, bool]:
        """The form in which its op gives a tensor to linears, and whether it gives one at all."""
        forms = self.forms.get(name, {})
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

    def position_squares(self) -> None:
        """Where the squares of each form are summed that is written without its factor."""
        results = [
            (now, op.outs[0] if isinstance(op, FusedContraction) else op.out)
            for now, op in enumerate(self.fused)
            if isinstance(op, FusedContraction | FusedPointwise | FusedGather)
        ]
        for now, name in ((-1, self.entry), *results):
            norm, _ = self.published(name)
            if norm:
                slot = self.slots.take("", 1, now, self.forms[name][norm])
                if slot >= MAX_SLOTS:
                    raise unfit(f"{slot + 1} normed tensors at a time")
                self.slot_of[name, norm] = slot

    # epilogues

    def is_ranked(self, op: FusedContraction) -> bool:
        return self.choice is not None and op.outs == (self.choice.source,)

    def epilogue(self, op: FusedContraction) -> BatchEpilogue:
        if len(op.operands) + len(op.streams) > MAX_CARRIED + 1:  # one less where streams meet
            raise unfit(f"{op.name!r}, whose epilogue takes {op.operands}")
        norm, publishes = self.published(op.outs[0])
        ranked = self.is_ranked(op)
        if ranked and (publishes or op.outs[0] in self.taken or op.num_ranks > 1):
            raise unfit(f"{op.name!r}, which a token is chosen from, for other ops too")
        if ranked and (len(op.streams) > 1 or op.operands):
            raise unfit(f"{op.name!r}, which a token is chosen from, of several products")
        return BatchEpilogue(
            num_streams=len(op.streams),
            formula=op.formula,
            num_carried=len(op.operands),
            biased=any(name for stream in op.streams for name in stream.biases),
            keeps=any(name in self.taken for name in op.outs),
            publishes=publishes,
            scaled=norm is not None,
            slot=self.slot_of[op.outs[0], norm] if norm else 0,
            summed=op.num_ranks > 1,
            ranked=ranked,
            weighted=op.experts is not None and op.experts.by == "rows",
        )

    def entry_epilogue(self) -> BatchEpilogue:
        """What becomes of the rows that come in."""
        return self.plain_epilogue(self.entry, summed=self.shares_rows)

    def plain_epilogue(self, name: str, *, summed: bool) -> BatchEpilogue:
        """What becomes of a tensor that is taken as it is."""
        norm, publishes = self.published(name)
        return BatchEpilogue(
            num_streams=1,
            formula=IDENTITY,
            num_carried=0,
            biased=False,
            keeps=name in self.taken,
            publishes=publishes,
            scaled=norm is not None,
            slot=self.slot_of[name, norm] if norm else 0,
            summed=summed,
            ranked=False,
        )

    def find_epilogues(self) -> list[BatchEpilogue]:
        """Those of all contractions, joined where they differ only in biases or in what is kept."""
        found: dict[BatchEpilogue, BatchEpilogue] = {}
        for op in self.fused:
            if isinstance(op, FusedContraction):
                one = self.epilogue(op)
                key = replace(one, biased=False, keeps=False)
                known = found.get(key, key)
                found[key] = replace(
                    key, biased=known.biased or one.biased, keeps=known.keeps or one.keeps
                )
        if len(found) > MAX_EPILOGUES:
            raise unfit(f"{len(found)} different epilogues")
        return list(found.values())

    def epilogue_number(self, op: FusedContraction) -> int:
        key = replace(self.epilogue(op), biased=False, keeps=False)
        keys = [replace(one, biased=False, keeps=False) for one in self.epilogues]
        return keys.index(key)

    # memory

    def reserve(self) -> None:
        """Room behind the events for what ranks exchange: their most likely tokens, before a step
        and behind the last one, and their parts of sums. In the order in which a step waits for
        them, since of waits with one flag the lowest word is reported (ptx/spins.py). For samples
        within limits, in place of the tokens, what BatchHead names.
        """
        head, ranks = self.choice, self.num_ranks
        gathers = head is not None and is_limited(head.sampler)
        sizes = {"best": 2 * ranks * BEST_WORDS} if head and not gathers else {}
        for number, rows in enumerate(self.summed):
            name = self.parts_name(number)
            sizes[name] = max(sizes.get(name, 0), ranks * rows * BATCH)
        if head and gathers:
            sizes |= {
                "ready_flags": ranks * READY_WORDS,
                "row_maxima": ranks * MAX_SMS * BATCH // 2,
            }
            sizes["logits"] = head.vocab * BATCH // 2
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
        kinds = FusedContraction | FusedAttention | FusedPointwise | FusedGather
        ops = [op for op in self.fused if isinstance(op, kinds)]
        samples = self.choice is not None and is_limited(self.choice.sampler)
        return 1 + len(ops) + len(made) + int(samples)

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

    def position_result(
        self, now: int, names: Sequence[str], rows: int, keeps: bool
    ) -> dict[str, int]:
        """Where a result of `rows` numbers goes, of which `names` are parts: the fields of an
        instruction. What is kept may take the place of an operand that nobody takes afterwards.
        """
        found: dict[str, int] = {}
        if keeps:
            last = max(self.taken.get(name, now) for name in names)
            found["keep"] = self.keep(now, rows, last, self.last_carried(now, rows))
            for name in names:
                self.number_of[name] = found["keep"]
        norm, publishes = self.published(names[0])
        if publishes:
            form = names[0], norm
            kind = "scaled" if norm else "as it is"
            found["dst"] = CHUNK * self.take_chunks(now, form, kind, rows)
            if norm:
                found["next_norm"] = self.placed.vector(norm.weight)
        return found

    def keep(self, now: int, rows: int, last: int, reused: int = NOTHING) -> int:
        """First of the numbers [16, rows] of a tensor taken until `last`; see _Pool.take."""
        first = self.numbers.take("", -(-rows // NUMBERS) * NUMBERS, now, last, reused)
        if self.numbers.size > BLOCK_MASK * NUMBERS:
            raise unfit(f"{self.numbers.size} numbers a row that are kept")
        return BATCH * first

    def last_carried(self, now: int, rows: int) -> int:
        """Where an operand lies that op number `now` takes last, or NOTHING."""
        op = self.fused[now] if now >= 0 else None
        if isinstance(op, FusedContraction | FusedPointwise):
            names = op.operands if isinstance(op, FusedContraction) else taken_by(op)
            for name in names:
                if name in self.tables:
                    continue
                if self.taken[name] == now and self.elements(name) == rows:
                    return self.number_of[name] // BATCH
        return NOTHING

    def take_chunks(self, now: int, form: Form, kind: str, rows: int) -> int:
        """First chunk of a form. Tensors of other sizes don't share one, since what lies behind the
        last row has to stay zero.
        """
        name, norm = form
        last = self.forms[name][norm]
        self.chunk_of[form] = self.chunks.take((kind, rows), tiles_k(rows), now, last)
        return self.chunk_of[form]

    def outputs(self) -> tuple[Kept, ...]:
        """Where outputs lie that no other rule brings out."""
        own = {self.choice.token, self.choice.logits} if self.choice else set()
        found = []
        for name in self.segment.outputs:
            if name in own:
                continue
            if name not in self.number_of:
                raise unfit(f"output {name!r}, which no op keeps")
            found.append(Kept(tensor=name, first=self.number_of[name], num=self.elements(name)))
        return tuple(found)

    # instructions

    def add_entry(self) -> None:
        """The rows that come in. Where ranks share a table, each has all columns of some tokens, or
        some columns of all; where they add up an input, the first rank has it and others add zeros.
        """
        op, hidden = self.embedding, self.elements(self.entry)
        rows, columns = self.weights.tensors[op.table].shape if op else (self.batch, hidden)
        is_whole = columns == hidden
        if self.shares_rows and op is None and self.team_rank:
            rows = 0
        self.vocab = self.head_rows()
        more = self.position_result(-1, (self.entry,), hidden, self.entry in self.taken)
        if self.shares_rows:
            more |= self.next_parts(hidden)
        for sm, queue in enumerate(self.queues):
            first, last = share(hidden, 1, sm, self.num_sms)
            queue.append(
                BatchEmbed(
                    name=op.name if op else self.entry,
                    row0=first * UNIT_ROWS,
                    num_units=last - first,
                    num_rows=hidden,
                    first_token=self.team_rank * rows if op and is_whole else 0,
                    num_tokens=rows,
                    first_column=0 if is_whole else self.team_rank * columns,
                    num_columns=columns,
                    first_id=self.team_rank * self.vocab,
                    best=self.symmetric.get("best", 0),
                    team_rank=self.team_rank,
                    **more,
                )
            )

    def head_rows(self) -> int:
        """Of this rank's part of what a token is chosen from."""
        ranked = [
            op for op in self.fused if isinstance(op, FusedContraction) and self.is_ranked(op)
        ]
        if self.choice and not ranked:
            raise unfit(f"a choice from {self.choice.source!r}")
        return rows_of(ranked[0], self.placed) if ranked else 0

    @property
    def logit_rows(self) -> int:
        """Of them, those that are tokens."""
        num = self.choice.vocab if self.choice else 0
        return min(self.vocab, max(0, num - self.team_rank * self.vocab))

    def add_contraction(self, now: int, op: FusedContraction) -> None:
        """The rows of its matrix, shared out; before it the form in which it takes x."""
        rows, streams = rows_of(op, self.placed), len(op.streams)
        columns = self.placed.columns[op.streams[0].weights[0]]
        outs = sum(map(self.elements, op.outs))
        times = op.experts.num_chosen if op.experts else 1
        if (self.elements(op.x), outs * streams) != (columns * times, rows):
            raise unfit(f"{op.name!r} of {self.elements(op.x)} elements a row")
        if op.num_ranks > 1 and rows % UNIT_ROWS:
            raise unfit(f"{op.name!r}, a sum over ranks of {rows} elements")
        if self.published(op.outs[0])[1] and len(op.outs) > 1:
            raise unfit(f"{op.name!r}, which attention reads, among others")
        common, starts = self.position_product(now, op)
        if op.experts:
            common["flags"] |= EXPERT_COLUMNS
        if self.is_ranked(op):
            self.add_head(op, starts[0], common)
            return
        for name in op.operands:
            if name not in self.number_of or self.elements(name) != outs:
                raise unfit(f"{op.name!r}, which takes {name!r} of another size")
        common |= zip(("carry", "carry2"), (self.number_of[n] for n in op.operands), strict=False)
        keeps = self.epilogues[common["opcode"]].keeps
        common |= self.position_result(now, op.outs, rows // streams, keeps)
        common |= self.next_parts(rows) if op.num_ranks > 1 else {}
        common["bias"] = self.placed.bias(op.streams, padded=True)
        for sm, queue in enumerate(self.queues):
            first, last = share(rows, streams, sm, self.num_sms)
            queue.append(
                BatchLinear(
                    name=op.name,
                    row0=first * UNIT_ROWS,
                    num_units=last - first,
                    num_rows=rows,
                    weight_row=starts[0] + first // streams * UNIT_ROWS,
                    pair_row=starts[1] + first // 2 * UNIT_ROWS if streams == 2 else 0,
                    **common,
                )
            )

    def add_pointwise(self, now: int, op: FusedPointwise) -> None:
        """Whole rows of its result, a sequence an SM."""
        rows, norm = self.elements(op.out), op.norm
        carried, table = split_operands(op, self.tables, self.elements)
        for name in (*carried, *filter(None, [op.x])):
            if name not in self.number_of:
                raise unfit(f"{op.name!r} of {name!r}, which no op keeps")
        kept = {name: self.number_of[name] for name in (op.x, *carried) if name}
        length = op.length if norm else rows
        form, publishes = self.published(op.out)
        if publishes and length % 2:
            raise unfit(f"{op.name!r}, which normalises {length} of {rows} elements together")
        formula = BatchFormula(
            norm=norm.kind if norm else "",
            formula=op.formula,
            num_carried=len(carried),
            has_table=table is not None,
            publishes=publishes,
            scaled=form is not None,
        )
        if formula not in self.formulas:
            self.formulas.append(formula)
        carries = zip(("carry", "carry2"), (kept[name] for name in carried), strict=False)
        addresses: dict[str, Any] = {
            **dict(carries), **self.position_result(now, (op.out,), rows, op.out in self.taken)
        }  # fmt: skip
        one = BatchPointwise(
            name=op.name,
            number=self.formulas.index(formula),
            num_rows=rows,
            length=length,
            src=kept.get(op.x, NOTHING),
            weight=self.placed.vector(norm.weight) if norm and norm.weight else NOTHING,
            bias=self.placed.vector(norm.bias) if norm and norm.bias else NOTHING,
            eps=norm.eps if norm else 0.0,
            table=self.placed.table(table.table) if table else NOTHING,
            by_position=table is not None and table.ids == self.positions,
            slot=self.slot_of.get((op.out, form), 0),
            **addresses,
        )
        for queue in self.queues:
            queue.append(one)

    def add_gather(self, now: int, op: FusedGather) -> None:
        """Columns that ranks have, shared out; each adds its own to a sum of zeros."""
        rows, columns = self.elements(op.out), self.elements(op.x)
        if op.x not in self.number_of or rows % UNIT_ROWS:
            raise unfit(f"{op.name!r} of {op.x!r}, of {rows} elements")
        epilogue = self.plain_epilogue(op.out, summed=True)
        if epilogue not in self.gathers:
            self.gathers.append(epilogue)
        common = self.position_result(now, (op.out,), rows, epilogue.keeps) | self.next_parts(rows)
        for sm, queue in enumerate(self.queues):
            first, last = share(rows, 1, sm, self.num_sms)
            queue.append(
                BatchGather(
                    name=op.name,
                    number=self.gathers.index(epilogue),
                    row0=first * UNIT_ROWS,
                    num_units=last - first,
                    num_rows=rows,
                    src=self.number_of[op.x],
                    first_column=self.team_rank * columns,
                    num_columns=columns,
                    **common,
                )
            )

    def position_product(self, now: int, op: FusedContraction) -> tuple[dict[str, int], list[int]]:
        """Fields of an instruction that say where x and the matrix lie, and the first row of each
        stream; before it the form in which it takes x.
        """
        columns = self.placed.columns[op.streams[0].weights[0]]
        form = op.x, op.norm
        if form not in self.chunk_of:
            self.add_form(now, op)
        matrix = [m.columns for m in self.placed.matrices].index(columns)
        paired = PAIRED if len(op.streams) == 2 else 0
        fields = {
            "opcode": self.epilogue_number(op),
            "num_tiles_k": tiles_k(columns),
            "length": columns,
            "src": self.chunk_of[form],
            "flags": (NORMED if form in self.slot_of else 0) | paired,
            "squares": self.slot_of.get(form, 0),
            "matrix": matrix,
        }
        return fields, self.placed.starts(op.name, op.streams, self.placed.matrices[matrix])

    def add_experts(self, now: int, op: FusedContraction) -> None:
        """The choice of experts, and their first matrices."""
        shape, (name,) = self.experts, op.outs
        assert shape is not None
        assert op.experts is not None
        columns = self.placed.columns[op.streams[0].weights[0]]
        if self.elements(op.x) != columns or self.published(name) != (None, True):
            raise unfit(f"{op.name!r} of {self.elements(op.x)} elements a row")
        choices = dict(self.scores_taken())
        scores = choices[now]
        if scores not in self.number_of or self.elements(scores) != shape.num_experts:
            raise unfit(f"{op.name!r}, whose experts {scores!r} chooses")
        if name in self.taken:
            raise unfit(f"{op.name!r}, whose result others than contractions take")
        common, starts = self.position_product(now, op)
        common["flags"] |= EXPERT_ROWS
        self.chunk_of[name, None] = self.chunks.take(
            ("experts", shape.width),
            min(shape.num_experts, self.batch * shape.num_chosen) * tiles_k(shape.width),
            now,
            self.forms[name][None],
        )
        one = BatchExperts(
            name=op.name,
            num_rows=shape.width * len(op.streams),
            weight_row=starts[0],
            pair_row=starts[-1],
            scores=self.number_of[scores],
            dst=CHUNK * self.chunk_of[name, None],
            choice=self.num_choices,
            num_choices=len(choices),
            **common,
        )
        self.num_choices += 1
        for queue in self.queues:
            queue.append(one)

    def add_form(self, now: int, op: FusedContraction) -> None:
        """Makes x as the op takes it from the numbers that are kept of it."""
        norm, columns = op.norm, self.elements(op.x)
        if op.x not in self.number_of:
            raise unfit(f"{op.name!r} of {op.x!r}, which no op keeps")
        one = BatchNorm(
            name=op.name,
            num_rows=columns,
            src=self.number_of[op.x],
            dst=CHUNK * self.take_chunks(now, (op.x, norm), "form", columns),
            weight=self.placed.vector(norm.weight) if norm else NOTHING,
            bias=self.placed.vector(norm.bias) if norm and norm.bias else NOTHING,
            kind=NORM_KINDS.index(norm.kind if norm else "none"),
            keep=self.keep_normed(now, (op.x, norm)),
        )
        for queue in self.queues:
            queue.append(one)

    def keep_normed(self, now: int, form: Form) -> int:
        """Where a form goes that is also taken as float32."""
        name = self.normed.get(form, "")
        if name:
            self.number_of[name] = self.keep(now, self.elements(name), self.taken[name])
        return self.number_of.get(name, NOTHING)

    def add_head(self, op: FusedContraction, start: int, common: dict[str, int]) -> None:
        """The rows that a token is chosen from."""
        assert self.choice is not None
        shared = {
            name: self.symmetric.get(name, 0) for name in ("logits", "row_maxima", "ready_flags")
        }
        for sm, queue in enumerate(self.queues):
            first, last = share(self.vocab, 1, sm, self.num_sms)
            queue.append(
                BatchHead(
                    name=op.name,
                    row0=first * UNIT_ROWS,
                    num_units=last - first,
                    num_rows=self.logit_rows,
                    weight_row=start + first * UNIT_ROWS,
                    first_id=self.team_rank * self.vocab,
                    bias=self.placed.bias(op.streams),
                    team_rank=self.team_rank,
                    num_tokens=self.choice.vocab,
                    **shared,
                    **common,
                )
            )

    def add_sample(self, op: FusedChoice) -> None:
        """What samples within limits from the logits of all."""
        shared = {
            name: self.symmetric.get(name, 0) for name in ("logits", "row_maxima", "ready_flags")
        }
        for queue in self.queues:
            queue.append(BatchSample(name=op.name, num_rows=op.vocab, **shared))

    def add_attention(self, now: int, op: FusedAttention) -> None:
        """Shares of the cached positions; k_row and v_row are of the first sequence and head."""
        shape = self.attention
        assert shape is not None
        rows = [num * shape.head_dim for num in (shape.num_heads, *[shape.num_kv_heads] * 2)]
        names = op.q, op.k, op.v
        for name, num in zip(names, rows, strict=True):
            if name not in self.number_of or self.elements(name) != num:
                raise unfit(f"{op.name!r}, which takes {name!r} of another size")
        row_bytes, width = shape.head_dim * ITEM_BYTES, shape.num_heads * shape.head_dim
        form = op.out, None
        if op.out in self.taken or not self.published(op.out)[1]:
            raise unfit(f"{op.name!r}, whose result others than contractions take as it is")
        one = BatchAttention(
            name=op.name,
            k_row=self.states.offset(op.k_cache) // row_bytes,
            v_row=self.states.offset(op.v_cache) // row_bytes,
            window=op.window or NO_WINDOW,
            src=self.number_of[op.q],
            k_src=self.number_of[op.k],
            v_src=self.number_of[op.v],
            num_rows=rows[0] if shape.apart else sum(rows),
            dst=CHUNK * self.take_chunks(now, form, "attention", width),
            q_norm=self.placed.vector(op.q_norm.weight) if op.q_norm else NOTHING,
            k_norm=self.placed.vector(op.k_norm.weight) if op.k_norm else NOTHING,
            table=self.placed.table(op.bias, "f32") if op.bias else 0,
        )
        for queue in self.queues:
            queue.append(one)
