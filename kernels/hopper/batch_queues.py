"""Queues of the batched decode kernel: the same instructions on every SM, each for its own rows.

In: fused ops of a step of up to 16 sequences, and the layouts of the weight and state arenas. Out:
a BatchQueues. Torch-free. Next on the walk: batch_runner.py.

Every SM takes part in every instruction, if only to count up its event, and waits for all SMs at
the one before. So whatever an instruction reads may be overwritten by the next but one, and one
buffer serves all layers.

Where ranks share the model, all have the same queues but for the vocabulary, and what is summed
over ranks goes through two buffers in turn, of the parts of h and of x: an SM's next push into the
same one comes after it has read what its like pushed into the other, which its like did after
reading this one. Between the last sum of a step and the embedding of the next, both into x, a rank
waits for the likeliest tokens of all, which each sends once all its SMs are past that sum.

Draws within limits need all logits of a sequence: each SM, done with the head, writes its own into
every rank's memory as plain numbers, then, behind a fence, two tagged words that tell that rank so.
The draw waits for these words of all SMs of all ranks in place of the head's event. They stand in
for the likeliest tokens above, too: an SM sends them when it is past all sums of the step. No one
overwrites logits that another still needs: the next step's come behind its embedding, to which each
rank adds its part only once all of its own SMs are done with the draw.
"""

from dataclasses import dataclass, field

from distmega.kernels.hopper.batch_words import (
    BATCH,
    BEST_WORDS,
    EVENT_WORDS,
    EVENTS_AT,
    TOLD_WORDS,
    BatchAttention,
    BatchDraw,
    BatchEmbed,
    BatchHead,
    BatchInstruction,
    BatchLinear,
    Opcode,
)
from distmega.kernels.hopper.layers import Block, Head, find_parts, find_shape
from distmega.kernels.hopper.matrices import Weights, tiles_k
from distmega.kernels.hopper.plan import ITEM_BYTES, Buffer, DecodeShape, Matrix, unfit
from distmega.kernels.hopper.queues import num_units, share
from distmega.kernels.hopper.words import MAX_SMS, NO_WINDOW, TILE_K, UNIT_ROWS
from distmega.kernels.runtime.arena import ArenaLayout
from distmega.kernels.tasks.fuse import (
    Draw,
    Fused,
    FusedAttention,
    FusedEmbedding,
    Norm,
    fuse_segment,
)
from distmega.program.types import Program

CHUNK = TILE_K * BATCH
"""Elements of 1024 columns of x."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchQueues:
    """Instructions of every SM, equally many. num_chunks: of the activations, 1024 columns each.
    qkv_rows: of the qkv output. draw: where tokens are not the likeliest. head_rows: of an SM, at
    most. logit_rows: this rank's logits, of tokens from first_id on, of all num_tokens. buffers:
    what ranks exchange, which lies behind the events. Names: tensors that the runner binds.
    """

    shape: DecodeShape
    matrices: tuple[Matrix, ...]
    queues: tuple[tuple[BatchInstruction, ...], ...]
    batch: int
    num_chunks: int
    qkv_rows: int
    draw: Draw | None
    head_rows: int
    logit_rows: int
    first_id: int
    num_tokens: int
    buffers: tuple[Buffer, ...]
    embed: str
    rope_table: str
    tokens: str
    positions: str
    token: str
    logits: str

    @property
    def first_word(self) -> int:
        """The first tagged word behind the report and the events."""
        return first_word(len(self.queues[0]))

    @property
    def first_list(self) -> int:
        """The first 64-bit word behind all that, where the lists of draws within limits lie."""
        return self.first_word + sum(buffer.num_words for buffer in self.buffers)

    @property
    def is_limited(self) -> bool:
        """Whether tokens are drawn within limits that are looked for."""
        return is_limited(self.draw)

    @property
    def num_ranks(self) -> int:
        """Ranks that share the segment."""
        return self.shape.num_ranks

    @property
    def gathers(self) -> bool:
        """Whether each rank gets the logits of all, and chooses from them by itself."""
        return self.is_limited and self.shape.num_ranks > 1


def first_word(num_events: int) -> int:
    """The first tagged word behind so many events."""
    return EVENTS_AT + num_events * EVENT_WORDS // 2


def is_limited(draw: Draw | None) -> bool:
    """Whether it is a draw within limits that are looked for."""
    return draw is not None and draw.limits != "given"


def build_batch_queues(
    segment: Program, weights: ArenaLayout, states: ArenaLayout, num_sms: int, place: int = 0
) -> BatchQueues:
    """Queues for `num_sms` SMs of rank number `place` of its team. UnsupportedError where the
    kernel can't do the segment.
    """
    fused = fuse_segment(segment)
    placed = Weights(segment, weights)
    shape = find_shape(segment, fused, placed, BATCH)
    num_sms = min(num_sms, MAX_SMS)
    return _BatchBuilder(segment, fused, placed, weights, states, shape, num_sms, place).build()


@dataclass
class _BatchBuilder:
    """Fills the queues op by op. chunks: first chunk of each buffer of activations; exchange: first
    tagged word of each buffer that ranks exchange.
    """

    segment: Program
    fused: tuple[Fused, ...]
    placed: Weights
    weights: ArenaLayout
    states: ArenaLayout
    shape: DecodeShape
    num_sms: int
    place: int
    exchange: dict[str, int] = field(default_factory=dict)
    buffers: list[Buffer] = field(default_factory=list)
    chunks: dict[str, int] = field(default_factory=dict)
    num_chunks: int = 0
    queues: list[list[BatchInstruction]] = field(default_factory=list)

    def build(self) -> BatchQueues:
        first, blocks, head = find_parts(self.fused)
        if not first or not head:
            raise unfit("several sequences in a stage without embedding or head")
        shape, attention, gated = self.shape, blocks[0][1], blocks[0][3]
        widths = shape.hidden, shape.num_heads * shape.head_dim, self.placed.rows_of(gated.gate)
        for name, width in zip(("x", "attended", "ffn"), widths, strict=True):
            self.chunks[name] = self.num_chunks
            self.num_chunks += tiles_k(width)
        self.queues = [[] for _ in range(self.num_sms)]
        if head.norm is None:
            raise unfit("a head without a norm")
        if head.draw and head.draw.positions != attention.positions:
            raise unfit(f"draws at {head.draw.positions!r} instead of {attention.positions!r}")
        norms = [block[0].norm for block in blocks] + [head.norm]
        first_id = self.place * shape.vocab
        self.reserve(2 + 5 * len(blocks), head)
        self.add_embedding(first, norms[0])
        for block, following in zip(blocks, norms[1:], strict=True):
            self.add_block(block, following)
        logit_rows = min(shape.vocab, max(0, head.vocab - first_id))
        self.add_head(head, logit_rows)
        return BatchQueues(
            shape=shape,
            matrices=self.placed.matrices,
            queues=tuple(map(tuple, self.queues)),
            batch=self.segment.tensor_map()[attention.positions].shape[0],
            num_chunks=self.num_chunks,
            qkv_rows=(shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim,
            draw=head.draw,
            head_rows=UNIT_ROWS * -(-num_units(shape.vocab) // self.num_sms),
            logit_rows=logit_rows,
            first_id=first_id,
            num_tokens=head.vocab,
            buffers=tuple(self.buffers),
            embed=first.table,
            rope_table=attention.table,
            tokens=first.ids,
            positions=attention.positions,
            token=head.token,
            logits=head.logits,
        )

    def reserve(self, num_events: int, head: Head) -> None:
        """Room behind the events for what ranks exchange: their likeliest tokens, before a step and
        behind the last one, and their parts of the two sums. In the order in which the embedding
        waits for them, since of waits with one tag the lowest word is reported (spins.py). For
        draws within limits, in place of the tokens, what BatchHead names.
        """
        ranks = self.shape.num_ranks
        part = ranks * self.shape.hidden * BATCH
        gathers = is_limited(head.draw)
        sizes = {} if gathers else {"best": 2 * ranks * BEST_WORDS}
        sizes |= {"parts of h": part, "parts of x": part}
        if gathers:
            num_events += 1
            sizes |= {"told": ranks * TOLD_WORDS, "highs": ranks * MAX_SMS * BATCH // 2}
            sizes["logits"] = head.vocab * BATCH // 2
        word = first_word(num_events)
        for name, size in sizes.items() if ranks > 1 else ():
            size = -(-size // 16) * 16
            self.exchange[name] = word
            self.buffers.append(Buffer(name=name, first=word, num_words=size))
            word += size

    def part_of(self, name: str) -> int:
        """First tagged word of this rank's part of a sum, 0 for one rank."""
        parts = self.exchange.get(f"parts of {name}", 0)
        return parts + self.place * self.shape.hidden * BATCH

    def add_embedding(self, op: FusedEmbedding, norm: Norm | None) -> None:
        """Each rank has all columns of some tokens, or some columns of all."""
        rows, columns = self.weights.tensors[op.table].shape
        is_whole = columns == self.shape.hidden
        best = self.exchange.get("best", 0)
        assert norm is not None, "find_parts asks for norms"
        for sm, queue in enumerate(self.queues):
            first, last = share(self.shape.hidden, 1, sm, self.num_sms)
            queue.append(
                BatchEmbed(
                    event=len(queue),
                    row0=first * UNIT_ROWS,
                    num_units=last - first,
                    num_rows=self.shape.hidden,
                    dst=self.chunks["x"] * CHUNK,
                    next_norm=self.placed.vector(norm.weight),
                    parts=self.exchange.get("parts of x", 0),
                    own_part=self.part_of("x"),
                    first_token=self.place * rows if is_whole else 0,
                    num_tokens=rows,
                    first_column=0 if is_whole else self.place * columns,
                    num_columns=columns,
                    first_id=self.place * self.shape.vocab,
                    best=best,
                    own_best=best + self.place * BEST_WORDS,
                )
            )

    def add_block(self, block: Block, following: Norm | None) -> None:
        """One layer; `following`: the norm of what it gives."""
        qkv, attention, out, gated, down = block
        rows = sum(map(self.placed.rows_of, qkv.weights))
        self.add(Opcode.QKV, rows, qkv.weights, src="x", norm=qkv.norm, biases=qkv.biases)
        self.add_shares(attention, rows)
        hidden = self.shape.hidden
        self.add(
            Opcode.RESIDUAL, hidden, (out.weight,), src="attended", dst="x", next_norm=gated.norm,
            total="h",
        )  # fmt: skip
        rows = 2 * self.placed.rows_of(gated.gate)
        weights = (gated.gate, gated.up)
        self.add(Opcode.GATED, rows, weights, src="x", dst="ffn", norm=gated.norm)
        self.add(
            Opcode.RESIDUAL, hidden, (down.weight,), src="ffn", dst="x", next_norm=following,
            total="x",
        )  # fmt: skip

    def add_head(self, head: Head, num_rows: int) -> None:
        """The head, num_rows of whose rows are tokens, and what draws from its logits."""
        matrix, (start,) = self.find_rows((head.weight,))
        logits, highs, told = (self.exchange.get(name, 0) for name in ("logits", "highs", "told"))
        for sm, queue in enumerate(self.queues):
            first, last = share(self.shape.vocab, 1, sm, self.num_sms)
            queue.append(
                BatchHead(
                    event=len(queue),
                    row0=first * UNIT_ROWS,
                    num_units=last - first,
                    num_rows=num_rows,
                    matrix=matrix,
                    weight_row=start + first * UNIT_ROWS,
                    num_tiles_k=tiles_k(self.placed.columns[head.weight]),
                    src=self.chunks["x"],
                    norm=1,
                    first_id=self.place * self.shape.vocab,
                    place=self.place,
                    num_tokens=head.vocab,
                    logits=logits,
                    highs=highs,
                    told=told,
                )
            )
            if is_limited(head.draw):
                queue.append(
                    BatchDraw(
                        event=len(queue), num_rows=head.vocab, logits=logits, highs=highs, told=told
                    )
                )

    def find_rows(self, names: tuple[str, ...]) -> tuple[int, list[int]]:
        """Which matrix has the weights, and the first row of each there."""
        columns = [m.columns for m in self.placed.matrices]
        matrix = columns.index(self.placed.columns[names[0]])
        return matrix, [self.placed.row_in(self.placed.matrices[matrix], name) for name in names]

    def add(
        self, opcode: Opcode, rows: int, names: tuple[str, ...], *, src: str,
        dst: str = "", norm: Norm | None = None, next_norm: Norm | None = None,
        biases: tuple[str, ...] = (), total: str = "",
    ) -> None:  # fmt: skip
        """A matrix, its rows shared out. total: which sum over ranks it is."""
        matrix, starts = self.find_rows(names)
        if opcode is Opcode.QKV:
            self.placed.require_adjacent(names, starts)
            self.placed.require_biases(biases)
        step = 2 if opcode is Opcode.GATED else 1
        for sm, queue in enumerate(self.queues):
            first, last = share(rows, step, sm, self.num_sms)
            queue.append(
                BatchLinear(
                    opcode=opcode,
                    event=len(queue),
                    row0=first * UNIT_ROWS,
                    num_units=last - first,
                    num_rows=rows,
                    matrix=matrix,
                    weight_row=starts[0] + first // step * UNIT_ROWS,
                    pair_row=starts[1] + first // 2 * UNIT_ROWS if step == 2 else 0,
                    num_tiles_k=tiles_k(self.placed.columns[names[0]]),
                    src=self.chunks[src],
                    norm=int(norm is not None),
                    bias=self.placed.vector(biases[0]) if any(biases) else -1,
                    dst=self.chunks[dst] * CHUNK if dst else 0,
                    next_norm=self.placed.vector(next_norm.weight) if next_norm else 0,
                    parts=self.exchange.get(f"parts of {total}", 0),
                    own_part=self.part_of(total) if total else 0,
                )
            )

    def add_shares(self, op: FusedAttention, rows: int) -> None:
        """The attention of a layer; k_row and v_row are of its first sequence and head."""
        row_bytes = self.shape.head_dim * ITEM_BYTES
        for queue in self.queues:
            queue.append(
                BatchAttention(
                    event=len(queue),
                    k_row=self.states.offset(op.k_cache) // row_bytes,
                    v_row=self.states.offset(op.v_cache) // row_bytes,
                    window=op.window or NO_WINDOW,
                    num_rows=rows,
                    dst=self.chunks["attended"] * CHUNK,
                    q_norm=self.placed.vector(op.q_norm.weight) if op.q_norm else -1,
                    k_norm=self.placed.vector(op.k_norm.weight) if op.k_norm else -1,
                )
            )
