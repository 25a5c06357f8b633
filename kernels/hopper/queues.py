"""Queues of the decode kernel: which SM computes which rows of which fused op, and where data lie.

In: fused ops (fusion.py), their tensors, and the layouts of the weight and state arenas. Out: a
DecodeQueues: the words of every SM, sizes of the exchange, and what the kernel is specialised for.
Torch-free. Next on the walk: runner.py.

Every SM gets the same number of rows of each matrix. No event orders the tasks: a reader polls the
words it needs until they carry the tag of their layer and step. A buffer may be overwritten in the
next layer because nobody can be a layer ahead: each op of a layer needs words from all SMs that
have work in it, and those have read what they needed before. SMs without work in some op could miss
a tag, so no more SMs take part than have rows in every gated op and in the head.

Where ranks share the model, all have the same queues, so an SM owns the same rows on each. It
pushes its part of the sums over ranks into the buffers of its likes, and each adds them up. No rank
can overwrite what another has not read: an SM's next push into the same buffer comes a layer later,
after it has read what its like pushed in the other sum of that layer, which its like did after
reading this one. What is pushed once a step, the embedded token, the logits and the best of them,
comes after all SMs of all ranks have read it, even with one layer: to push logits or the best of
them an SM needs x of the last layer, which needs the ffn words of all SMs of all ranks, each of
which has then read what it needed of this step's token and of the last step's logits. And to push
the token's row a rank needs the token, so x of the last layer as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

from distmega.kernels.fusion import (
    Draw,
    Fused,
    FusedAttention,
    FusedEmbedding,
    FusedHead,
    Norm,
    fuse_segment,
)
from distmega.kernels.hopper.layers import Block, find_parts, find_shape
from distmega.kernels.hopper.matrices import Weights, tiles_k
from distmega.kernels.hopper.plan import (
    ITEM_BYTES,
    Buffer,
    DecodeQueues,
    DecodeShape,
    unfit,
)
from distmega.kernels.hopper.words import (
    EMBEDDED,
    FROM_EMBEDDING,
    MAX_SMS,
    MAX_SPLITS,
    NO_WINDOW,
    PARTIAL_EXTRA,
    REPORT_WORDS,
    SAMPLE_CHUNK,
    SEARCH_CHUNKS,
    UNIT_ROWS,
    Attention,
    Barrier,
    Combine,
    Embed,
    Instruction,
    Linear,
    Opcode,
    Sample,
)
from distmega.kernels.runtime.arena import ArenaLayout
from distmega.kernels.tasks.graph import Mode
from distmega.program.types import Program

NUM_BARRIERS = 5
"""Of a layer: one behind each of its ops."""
EMBED_WORDS = 256
"""Tagged words of the embedded token that one SM pushes: one a thread."""


def build_queues(
    segment: Program,
    weights: ArenaLayout,
    states: ArenaLayout,
    num_sms: int,
    place: int = 0,
    mode: Mode = "overlap",
) -> DecodeQueues:
    """Queues for at most `num_sms` SMs of rank number `place` of its team. mode "op": each fused op
    waits for all SMs to be done with the one before, as with one event an op; a baseline, and an
    oracle for the results. VerifyError where the kernel can't do the segment.
    """
    fused = fuse_segment(segment)
    return _Builder(segment, fused, weights, states, num_sms, place, mode).build()


@dataclass(slots=True)
class _Builder:
    """Fills the queues op by op; `placed` and `shape` are known once `build` began."""

    segment: Program
    fused: tuple[Fused, ...]
    weights: ArenaLayout
    states: ArenaLayout
    num_sms: int
    place: int
    mode: Mode
    exchange: dict[str, int] = field(default_factory=dict)
    buffers: list[Buffer] = field(default_factory=list)
    num_words: int = REPORT_WORDS
    queues: list[list[Instruction]] = field(default_factory=list)
    placed: Weights = field(init=False)
    shape: DecodeShape = field(init=False)
    lightest: list[int] = field(init=False)

    def build(self) -> DecodeQueues:
        self.placed = Weights(self.segment, self.weights)
        first, blocks, head = find_parts(self.fused)
        self.shape = find_shape(self.segment, self.fused, self.placed)
        self.num_sms = self.count_sms(blocks, head)
        self.queues = [[] for _ in range(self.num_sms)]
        self.lightest = self.find_lightest(blocks[0])
        self.reserve(blocks, head)
        self.add_embedding(first)
        for number, block in enumerate(blocks):
            self.add_layer(number, block)
        first_id = self.place * self.shape.vocab
        attention, last = blocks[0][1], blocks[-1][4]
        if head:
            limit = min(self.shape.vocab, max(0, head.vocab - first_id))
            self.add_linear(
                Opcode.HEAD, (head.weight,), self.shape.vocab, src="x", dst="logits",
                dst_offset=self.place * self.slots, norm=head.norm, layer=len(blocks) - 1,
                limit=limit,
            )  # fmt: skip
            if head.draw and head.draw.positions != attention.positions:
                raise unfit(f"draws at {head.draw.positions!r} instead of {attention.positions!r}")
            if head.draw:
                self.add_samples(head.draw, len(blocks) - 1, limit)
        return DecodeQueues(
            shape=self.shape,
            mode=self.mode,
            matrices=self.placed.matrices,
            queues=tuple(map(tuple, self.queues)),
            draw=head.draw if head else None,
            head_rows=self.head_rows(head.draw if head else None),
            best=self.exchange["best"],
            sample=self.exchange["sample"],
            num_words=self.num_words,
            buffers=tuple(self.buffers),
            first_id=first_id,
            embed=first.table if first else "",
            rope_table=attention.table,
            tokens=first.ids if first else "",
            positions=attention.positions,
            token=head.token if head else "",
            logits=head.logits if head else "",
            entry="" if first else blocks[0][0].x,
            exit="" if head else last.out,
            exit_word=self.exchange["x"],
        )

    def count_sms(self, blocks: Sequence[Block], head: FusedHead | None) -> int:
        gated = blocks[0][3]
        num_sms = min(self.num_sms, num_units(self.placed.rows_of(gated.gate)))
        return min(num_sms, num_units(self.shape.vocab)) if head else num_sms

    def reserve(self, blocks: Sequence[Block], head: FusedHead | None) -> None:
        """Room in the exchange behind the report, in tagged words and in the order of dataflow (see
        spins.py); bf16 pairs but for qkv, partials, sample and best.

        With several ranks the embedded token is first, and right before x and h lie all ranks'
        parts of the sums that they come from. logits: of all ranks, where limits are looked for
        among them; then best is a rank's own, and else all ranks'. sample: see num_sample_words.
        """
        s, gated, draw = self.shape, blocks[0][3], head.draw if head else None
        heads = s.num_heads + 2 * s.num_kv_heads
        parts = s.num_ranks * s.hidden if s.num_ranks > 1 else 0
        sizes = {
            "embedded": s.hidden // 2 if s.num_ranks > 1 else 0,
            "qkv": heads * s.head_dim,
            "partial": s.num_heads * self.max_splits * (s.head_dim + PARTIAL_EXTRA),
            "attended": s.num_heads * s.head_dim // 2,
            "parts of h": parts,
            "h": s.hidden // 2,
            "ffn": self.placed.rows_of(gated.gate) // 2,
            "parts of x": parts,
            "x": s.hidden // 2,
            "logits": s.num_ranks * self.slots if self.draws_from_all(draw) else 0,
            "sample": num_sample_words(draw, self.head_rows(draw)) if draw else 0,
            "best": 2 * self.num_sms * (1 if self.draws_from_all(draw) else s.num_ranks),
        }
        if self.mode == "op":
            sizes |= {f"barrier {number}": 2 * self.num_sms for number in range(NUM_BARRIERS)}
        for name, size in sizes.items():
            self.exchange[name] = self.num_words
            self.buffers.append(Buffer(name=name, first=self.num_words, num_words=size))
            assert not name.startswith("parts") or size % 16 == 0
            self.num_words += -(-size // 16) * 16
        assert self.exchange["embedded"] == EMBEDDED

    def add_embedding(self, op: FusedEmbedding | None) -> None:
        """Where ranks share the matrix, those with a part of the token's row push it to all. In a
        stage that gets x, it is a matrix of one row, which the first rank has.
        """
        if self.shape.num_ranks == 1:
            return
        rows, columns = self.weights.tensors[op.table].shape if op else (1, self.shape.hidden)
        is_whole = columns == self.shape.hidden
        for number, column in enumerate(range(0, columns // 2, EMBED_WORDS)):
            self.queues[self.lightest[number % self.num_sms]].append(
                Embed(
                    row0=self.place * rows if is_whole else 0,
                    num_rows=rows,
                    column=column,
                    num_words=columns // 2,
                    dst=self.exchange["embedded"] + (0 if is_whole else self.place * columns // 2),
                )
            )

    @property
    def slots(self) -> int:
        """Of a rank's logits where all ranks have those of all: a whole number of units."""
        return UNIT_ROWS * num_units(self.shape.vocab)

    def draws_from_all(self, draw: Draw | None) -> bool:
        """Whether a rank needs the logits of others: limits are those of all tokens."""
        return draw is not None and draw.limits != "given" and self.shape.num_ranks > 1

    def head_rows(self, draw: Draw | None) -> int:
        """Logits from which one SM chooses, at most; two a thread where it polls them."""
        if not self.draws_from_all(draw):
            return UNIT_ROWS * -(-num_units(self.shape.vocab) // self.num_sms)
        units = self.shape.num_ranks * num_units(self.shape.vocab)
        return max(2 * MAX_SMS, UNIT_ROWS * -(-units // self.num_sms))

    def add_samples(self, draw: Draw, layer: int, limit: int) -> None:
        """Each SM draws from what it has of the head, or from as large a part of all logits."""
        if self.draws_from_all(draw):
            rows = self.shape.num_ranks * self.slots
            src, limit, vocab = self.exchange["logits"], rows, self.shape.vocab
        else:
            rows, src, vocab = self.shape.vocab, 0, 0
        for sm, queue in enumerate(self.queues):
            first, last = share(rows, 1, sm, self.num_sms)
            queue.append(
                Sample(
                    layer=layer,
                    row0=first * UNIT_ROWS,
                    num_rows=min(last * UNIT_ROWS, limit),
                    src=src,
                    vocab=vocab,
                )
            )

    @property
    def max_splits(self) -> int:
        num_tasks = self.shape.num_kv_heads * self.shape.num_parts
        return max(1, min(MAX_SPLITS, self.num_sms // num_tasks))

    def add_layer(self, layer: int, block: Block) -> None:
        qkv, attention, out, gated, down = block
        first = FROM_EMBEDDING if layer == 0 else 0
        pushed = layer == 0 and self.shape.num_ranks > 1
        summed = Opcode.PARTIAL if self.shape.num_ranks > 1 else Opcode.RESIDUAL
        rows = sum(self.placed.rows_of(weight) for weight in qkv.weights)
        self.add_linear(
            Opcode.QKV, qkv.weights, rows, src="embedded" if pushed else "x", dst="qkv",
            tag_delta=0 if pushed else 1, norm=qkv.norm, biases=qkv.biases, layer=layer,
            flags=0 if pushed else first,
        )  # fmt: skip
        self.add_barrier(layer, 0)
        self.add_attention(layer, attention)
        self.add_barrier(layer, 1)
        self.add_linear(
            summed, (out.weight,), self.shape.hidden, src="attended", dst="h", layer=layer,
            flags=first,
        )  # fmt: skip
        self.add_barrier(layer, 2)
        self.add_linear(
            Opcode.GATED, (gated.gate, gated.up), 2 * self.placed.rows_of(gated.gate), src="h",
            dst="ffn", norm=gated.norm, layer=layer,
        )  # fmt: skip
        self.add_barrier(layer, 3)
        self.add_linear(summed, (down.weight,), self.shape.hidden, src="ffn", dst="x", layer=layer)
        self.add_barrier(layer, 4)

    def add_barrier(self, layer: int, number: int) -> None:
        """All SMs wait for each other, in mode "op"."""
        if self.mode == "op":
            dst = self.exchange[f"barrier {number}"]
            for queue in self.queues:
                queue.append(Barrier(layer=layer, dst=dst, num_words=2 * self.num_sms))

    def add_linear(
        self, opcode: Opcode, names: tuple[str, ...], rows: int, *, src: str, dst: str, layer: int,
        norm: Norm | None = None, biases: tuple[str, ...] = (), tag_delta: int = 0, flags: int = 0,
        limit: int | None = None, dst_offset: int = 0,
    ) -> None:  # fmt: skip
        """A matrix, its rows shared out. limit: of the last row that counts, `rows` if None."""
        columns = self.placed.columns[names[0]]
        matrix = [m.columns for m in self.placed.matrices].index(columns)
        starts = [self.placed.row_in(self.placed.matrices[matrix], name) for name in names]
        bias = self.placed.vector(biases[0]) if any(biases) else -1
        step = 2 if opcode is Opcode.GATED else 1
        if opcode is Opcode.QKV:
            self.placed.require_adjacent(names, starts)
            self.placed.require_biases(biases)
        for sm, queue in enumerate(self.queues):
            first, last = share(rows, step, sm, self.num_sms)
            if first == last:
                continue
            queue.append(
                Linear(
                    opcode=opcode,
                    layer=layer,
                    matrix=matrix,
                    weight_row=starts[0] + first // step * UNIT_ROWS,
                    pair_row=starts[1] + first // 2 * UNIT_ROWS if step == 2 else 0,
                    num_units=last - first,
                    num_tiles_k=tiles_k(columns),
                    src=self.exchange[src],
                    num_src_words=columns // 2,
                    tag_delta=tag_delta,
                    norm=self.placed.vector(norm.weight) if norm else -1,
                    bias=bias,
                    dst=self.exchange[dst] + dst_offset,
                    row0=first * UNIT_ROWS,
                    num_rows=rows if limit is None else min(rows, limit),
                    flags=flags,
                )
            )

    def find_lightest(self, block: Block) -> list[int]:
        """SMs in the order of the tiles that a layer's linears give them: cached keys and values,
        and the work on them, go to those with the fewest.
        """
        qkv, _, out, gated, down = block
        gate_up = (gated.gate, gated.up)
        matrices = ((qkv.weights, 1), ((out.weight,), 1), (gate_up, 2), ((down.weight,), 1))
        load = [0] * self.num_sms
        for names, step in matrices:
            rows = sum(map(self.placed.rows_of, names))
            for sm in range(self.num_sms):
                first, last = share(rows, step, sm, self.num_sms)
                load[sm] += (last - first) * tiles_k(self.placed.columns[names[0]])
        return sorted(range(self.num_sms), key=lambda sm: (load[sm], sm))

    def add_attention(self, layer: int, op: FusedAttention) -> None:
        s, window = self.shape, op.window or NO_WINDOW
        tasks = product(range(self.max_splits), range(s.num_kv_heads), range(s.num_parts))
        for number, (split, head, part) in enumerate(tasks):
            self.queues[self.lightest[number % self.num_sms]].append(
                Attention(
                    layer=layer,
                    k_row=self.cache_row(op.k_cache, head),
                    v_row=self.cache_row(op.v_cache, head),
                    head=head,
                    query0=s.first_query(head, part),
                    window=window,
                    split=split,
                    max_splits=self.max_splits,
                    src=self.exchange["qkv"],
                    partial=self.exchange["partial"],
                    q_norm=self.placed.vector(op.q_norm.weight) if op.q_norm else -1,
                    k_norm=self.placed.vector(op.k_norm.weight) if op.k_norm else -1,
                )
            )
        for head in range(s.num_heads):
            sm = self.lightest[-1 - head % self.num_sms]
            self.queues[sm].append(
                Combine(
                    layer=layer,
                    head=head,
                    window=window,
                    max_splits=self.max_splits,
                    partial=self.exchange["partial"],
                    dst=self.exchange["attended"],
                )
            )

    def cache_row(self, name: str, head: int) -> int:
        row_bytes = self.shape.head_dim * ITEM_BYTES
        return self.states.offset(name) // row_bytes + head * self.shape.max_context


def share(rows: int, step: int, sm: int, num_sms: int) -> tuple[int, int]:
    """First unit of an SM and of the next one; multiples of `step` units."""
    parts = num_units(rows) // step
    return parts * sm // num_sms * step, parts * (sm + 1) // num_sms * step


def num_sample_words(draw: Draw, head_rows: int) -> int:
    """Tagged words in which SMs exchange what they need to find the limits of a draw, each having
    at most head_rows logits: a chunk of maxima, then as many as those may fill; or those of a
    search.
    """
    chunks = {"given": 0, "candidates": 2 + head_rows // SAMPLE_CHUNK, "all": SEARCH_CHUNKS}
    return chunks[draw.limits] * SAMPLE_CHUNK * MAX_SMS


def num_units(rows: int) -> int:
    return -(-rows // UNIT_ROWS)
