"""Queues of the batched decode kernel: the same instructions on every SM, each for its own rows.

In: fused ops of a step of up to 16 sequences, and the layouts of the weight and state arenas. Out:
a BatchQueues. Torch-free. Next on the walk: batch_runner.py.

Every SM takes part in every instruction, if only to count up its event, and waits for all SMs at
the one before. So whatever an instruction reads may be overwritten by the next but one, and one
buffer serves all layers.
"""

from dataclasses import dataclass, field

from distmega.kernels.arena import ArenaLayout
from distmega.kernels.fusion import Draw, Fused, FusedAttention, Norm, fuse_segment
from distmega.kernels.hopper.batch_words import (
    BATCH,
    BatchAttention,
    BatchInstruction,
    BatchLinear,
    Opcode,
)
from distmega.kernels.hopper.layers import Block, find_parts, find_shape
from distmega.kernels.hopper.matrices import Weights, tiles_k
from distmega.kernels.hopper.plan import ITEM_BYTES, DecodeShape, Matrix, unfit
from distmega.kernels.hopper.queues import num_units, share
from distmega.kernels.hopper.words import MAX_SMS, NO_WINDOW, TILE_K, UNIT_ROWS
from distmega.program import Program

CHUNK = TILE_K * BATCH
"""Elements of 1024 columns of x."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchQueues:
    """Instructions of every SM, equally many. num_chunks: of the activations, 1024 columns each.
    qkv_rows: of the qkv output. draw: where tokens are not the likeliest. head_rows: of an SM, at
    most. Names: tensors that the runner binds.
    """

    shape: DecodeShape
    matrices: tuple[Matrix, ...]
    queues: tuple[tuple[BatchInstruction, ...], ...]
    batch: int
    num_chunks: int
    qkv_rows: int
    draw: Draw | None
    head_rows: int
    embed: str
    rope_table: str
    tokens: str
    positions: str
    token: str
    logits: str


def build_batch_queues(
    segment: Program, weights: ArenaLayout, states: ArenaLayout, num_sms: int
) -> BatchQueues:
    """Queues for `num_sms` SMs. VerifyError where the kernel can't do the segment."""
    fused = fuse_segment(segment)
    placed = Weights(segment, weights)
    shape = find_shape(segment, fused, placed, BATCH)
    if shape.num_ranks > 1:
        raise unfit(f"several sequences on {shape.num_ranks} ranks")
    return _BatchBuilder(segment, fused, placed, states, shape, min(num_sms, MAX_SMS)).build()


@dataclass
class _BatchBuilder:
    """Fills the queues op by op. chunks: first chunk of each buffer of activations."""

    segment: Program
    fused: tuple[Fused, ...]
    placed: Weights
    states: ArenaLayout
    shape: DecodeShape
    num_sms: int
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
        self.add(Opcode.EMBED, shape.hidden, dst="x", next_norm=norms[0])
        for block, following in zip(blocks, norms[1:], strict=True):
            self.add_block(block, following)
        self.add(Opcode.HEAD, shape.vocab, (head.weight,), src="x", norm=head.norm)
        if head.draw and head.draw.limits != "given":
            self.add(Opcode.DRAW, shape.vocab)
        return BatchQueues(
            shape=shape,
            matrices=self.placed.matrices,
            queues=tuple(map(tuple, self.queues)),
            batch=self.segment.tensor_map()[attention.positions].shape[0],
            num_chunks=self.num_chunks,
            qkv_rows=(shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim,
            draw=head.draw,
            head_rows=UNIT_ROWS * -(-num_units(shape.vocab) // self.num_sms),
            embed=first.table,
            rope_table=attention.table,
            tokens=first.ids,
            positions=attention.positions,
            token=head.token,
            logits=head.logits,
        )

    def add_block(self, block: Block, following: Norm | None) -> None:
        """One layer; `following`: the norm of what it gives."""
        qkv, attention, out, gated, down = block
        rows = sum(map(self.placed.rows_of, qkv.weights))
        self.add(Opcode.QKV, rows, qkv.weights, src="x", norm=qkv.norm, biases=qkv.biases)
        self.add_shares(attention, rows)
        hidden = self.shape.hidden
        self.add(
            Opcode.RESIDUAL, hidden, (out.weight,), src="attended", dst="x",
            next_norm=gated.norm,
        )  # fmt: skip
        rows = 2 * self.placed.rows_of(gated.gate)
        weights = (gated.gate, gated.up)
        self.add(Opcode.GATED, rows, weights, src="x", dst="ffn", norm=gated.norm)
        self.add(Opcode.RESIDUAL, hidden, (down.weight,), src="ffn", dst="x", next_norm=following)

    def add(
        self, opcode: Opcode, rows: int, names: tuple[str, ...] = (), *, src: str = "",
        dst: str = "", norm: Norm | None = None, next_norm: Norm | None = None,
        biases: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        columns = self.placed.columns[names[0]] if names else 0
        matrix = [m.columns for m in self.placed.matrices].index(columns) if names else 0
        starts = [self.placed.row_in(self.placed.matrices[matrix], name) for name in names]
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
                    weight_row=starts[0] + first // step * UNIT_ROWS if names else 0,
                    pair_row=starts[1] + first // 2 * UNIT_ROWS if step == 2 else 0,
                    num_tiles_k=tiles_k(columns),
                    src=self.chunks[src] if src else 0,
                    norm=int(norm is not None),
                    bias=self.placed.vector(biases[0]) if any(biases) else -1,
                    dst=self.chunks[dst] * CHUNK if dst else 0,
                    next_norm=self.placed.vector(next_norm.weight) if next_norm else 0,
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
