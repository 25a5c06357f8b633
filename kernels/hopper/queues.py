"""Queues of the decode kernel: which SM computes which rows of which fused op, and where data lie.

In: fused ops (fusion.py), their tensors, and the layouts of the weight and state arenas. Out: a
DecodeQueues: the words of every SM, sizes of the exchange, and what the kernel is specialised for.
Torch-free. Next on the walk: runner.py.

Every SM gets the same number of rows of each matrix. No event orders the tasks: a reader polls the
words it needs until they carry the tag of their layer and step. A buffer may be overwritten in the
next layer because nobody can be a layer ahead: each op of a layer needs words from all SMs that
have work in it, and those have read what they needed before. SMs without work in some op could miss
a tag, so no more SMs take part than have rows in every gated op and in the head.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from distmega.errors import VerifyError
from distmega.kernels.arena import ArenaLayout
from distmega.kernels.fusion import (
    Fused,
    FusedAttention,
    FusedEmbedding,
    FusedGated,
    FusedHead,
    FusedLinear,
    FusedResidual,
    Norm,
    fuse_segment,
)
from distmega.kernels.hopper.plan import DecodeQueues, DecodeShape, Matrix
from distmega.kernels.hopper.weight_order import matrix_columns
from distmega.kernels.hopper.words import (
    FROM_EMBEDDING,
    MAX_SPLITS,
    PARTIAL_EXTRA,
    TILE_K,
    UNIT_ROWS,
    Attention,
    Combine,
    Instruction,
    Linear,
    Opcode,
)
from distmega.program import Program

HEAD_DIMS = (64, 128)
MAX_GROUP = 8
MAX_MATRICES = 3
ITEM_BYTES = 2
_LAYER = (FusedLinear, FusedAttention, FusedResidual, FusedGated, FusedResidual)


def build_queues(
    segment: Program, weights: ArenaLayout, states: ArenaLayout, num_sms: int
) -> DecodeQueues:
    """Queues for at most `num_sms` SMs. VerifyError where the kernel can't do the segment."""
    return _Builder(segment, fuse_segment(segment), weights, states, num_sms).build()


@dataclass(slots=True)
class _Builder:
    """Fills the queues op by op; `columns`, `shape` and `matrices` are known once `build` began."""

    segment: Program
    fused: tuple[Fused, ...]
    weights: ArenaLayout
    states: ArenaLayout
    num_sms: int
    exchange: dict[str, int] = field(default_factory=dict)
    num_words: int = 0
    queues: list[list[Instruction]] = field(default_factory=list)
    columns: dict[str, int] = field(init=False)
    shape: DecodeShape = field(init=False)
    matrices: tuple[Matrix, ...] = field(init=False)
    lightest: list[int] = field(init=False)

    def build(self) -> DecodeQueues:
        self.columns = matrix_columns(self.segment)
        first, *layers, head = self.fused
        if not isinstance(first, FusedEmbedding) or not isinstance(head, FusedHead):
            raise _unfit("a segment without embedding or head")
        blocks = [tuple(layers[i : i + 5]) for i in range(0, len(layers), 5)]
        if any(tuple(map(type, block)) != _LAYER for block in blocks):
            raise _unfit("layers other than attention and gated feed-forward")
        self.shape = self.find_shape(blocks, head)
        self.matrices = self.find_matrices()
        self.num_sms = self.count_sms(blocks, head)
        self.queues = [[] for _ in range(self.num_sms)]
        self.lightest = self.find_lightest(blocks[0])
        self.reserve(blocks)
        x = first.out
        for number, block in enumerate(blocks):
            x = self.add_layer(number, block, x)
        if head.x != x:
            raise _unfit(f"a head of {head.x!r} instead of {x!r}")
        self.add_linear(
            Opcode.HEAD, (head.weight,), self.shape.vocab, src="x", dst="best",
            norm=head.norm, layer=len(blocks) - 1,
        )  # fmt: skip
        attention = blocks[0][1]
        assert isinstance(attention, FusedAttention)
        return DecodeQueues(
            shape=self.shape,
            matrices=self.matrices,
            queues=tuple(map(tuple, self.queues)),
            best=self.exchange["best"],
            num_words=self.num_words,
            embed=first.table,
            rope_table=attention.table,
            tokens=first.ids,
            positions=attention.positions,
            token=head.token,
            logits=head.logits,
        )

    def find_shape(self, blocks: Sequence[tuple[Fused, ...]], head: FusedHead) -> DecodeShape:
        tensors = self.segment.tensor_map()
        attention = blocks[0][1]
        assert isinstance(attention, FusedAttention)
        rows, num_kv_heads, group, head_dim = tensors[attention.q].shape
        columns = self.columns
        hidden = columns[head.weight]
        if rows != 1 or head_dim not in HEAD_DIMS or group > MAX_GROUP or attention.window:
            raise _unfit(f"{rows} tokens, heads of {head_dim}, groups of {group} queries, a window")
        if any(length % 64 for length in columns.values()):
            raise _unfit(f"rows of {sorted(set(columns.values()))} elements")
        norms = [norm.eps for op in self.fused for norm in _norms(op)]
        if len(set(norms)) != 1:
            raise _unfit(f"norms with eps {sorted(set(norms))}")
        return DecodeShape(
            num_layers=len(blocks),
            hidden=hidden,
            num_heads=num_kv_heads * group,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab=tensors[head.logits].shape[-1],
            max_context=tensors[attention.k_cache].shape[1],
            qk_norm=attention.q_norm is not None,
            eps=norms[0],
            scale=attention.scale,
            max_tiles_k=max(map(_tiles_k, columns.values())),
        )

    def find_matrices(self) -> tuple[Matrix, ...]:
        columns = self.columns
        found: dict[int, list[int]] = {}
        for name, length in columns.items():
            offset = self.weights.offset(name)
            end = offset + self.weights.tensors[name].num_bytes
            first, last = found.setdefault(length, [offset, end])
            found[length] = [min(first, offset), max(last, end)]
        matrices = tuple(
            Matrix(columns=n, offset=first, num_rows=(last - first) // (n * ITEM_BYTES))
            for n, (first, last) in sorted(found.items())
        )
        overlap = any(
            a.offset + a.num_rows * a.columns * ITEM_BYTES > b.offset
            for a, b in pairwise(sorted(matrices, key=lambda m: m.offset))
        )
        if len(matrices) > MAX_MATRICES or overlap:
            raise _unfit(f"an arena with matrices of {[m.columns for m in matrices]} columns")
        return matrices

    def count_sms(self, blocks: Sequence[tuple[Fused, ...]], head: FusedHead) -> int:
        gated = blocks[0][3]
        assert isinstance(gated, FusedGated)
        pairs = _units(self.rows_of(gated.gate))
        return min(self.num_sms, pairs, _units(self.shape.vocab))

    def reserve(self, blocks: Sequence[tuple[Fused, ...]]) -> None:
        """Room in the exchange, in tagged words; bf16 pairs but for qkv, partials and best."""
        s, gated = self.shape, blocks[0][3]
        assert isinstance(gated, FusedGated)
        heads = s.num_heads + 2 * s.num_kv_heads
        sizes = {
            "x": s.hidden // 2,
            "h": s.hidden // 2,
            "qkv": heads * s.head_dim,
            "partial": s.num_heads * self.max_splits * (s.head_dim + PARTIAL_EXTRA),
            "attended": s.num_heads * s.head_dim // 2,
            "ffn": self.rows_of(gated.gate) // 2,
            "best": 2 * self.num_sms,
        }
        for name, size in sizes.items():
            self.exchange[name] = self.num_words
            self.num_words += -(-size // 16) * 16

    @property
    def max_splits(self) -> int:
        return max(1, min(MAX_SPLITS, self.num_sms // self.shape.num_kv_heads))

    def add_layer(self, layer: int, block: tuple[Fused, ...], x: str) -> str:
        qkv, attention, out, gated, down = block
        assert isinstance(qkv, FusedLinear)
        assert isinstance(attention, FusedAttention)
        assert isinstance(out, FusedResidual)
        assert isinstance(gated, FusedGated)
        assert isinstance(down, FusedResidual)
        edges = (
            (qkv.x, x), (qkv.outs, (attention.q, attention.k, attention.v)),
            (out.x, attention.out), (out.residual, x), (gated.x, out.out), (down.x, gated.out),
            (down.residual, out.out),
        )  # fmt: skip
        if any(found != wanted for found, wanted in edges) or not qkv.norm or not gated.norm:
            raise _unfit(f"layer {layer}, whose ops are joined in another way")
        first = FROM_EMBEDDING if layer == 0 else 0
        rows = sum(self.rows_of(weight) for weight in qkv.weights)
        self.add_linear(
            Opcode.QKV, qkv.weights, rows, src="x", dst="qkv", tag_delta=1, norm=qkv.norm,
            biases=qkv.biases, layer=layer, flags=first,
        )  # fmt: skip
        self.add_attention(layer, attention)
        self.add_linear(
            Opcode.RESIDUAL, (out.weight,), self.shape.hidden, src="attended", dst="h",
            layer=layer, flags=first,
        )  # fmt: skip
        self.add_linear(
            Opcode.GATED, (gated.gate, gated.up), 2 * self.rows_of(gated.gate), src="h", dst="ffn",
            norm=gated.norm, layer=layer,
        )  # fmt: skip
        self.add_linear(
            Opcode.RESIDUAL, (down.weight,), self.shape.hidden, src="ffn", dst="x", layer=layer
        )
        return down.out

    def add_linear(
        self, opcode: Opcode, names: tuple[str, ...], rows: int, *, src: str, dst: str, layer: int,
        norm: Norm | None = None, biases: tuple[str, ...] = (), tag_delta: int = 0, flags: int = 0,
    ) -> None:  # fmt: skip
        columns = self.columns[names[0]]
        matrix = [m.columns for m in self.matrices].index(columns)
        starts = [self.row_in(self.matrices[matrix], name) for name in names]
        bias = self.vector(biases[0]) if any(biases) else -1
        step = 2 if opcode is Opcode.GATED else 1
        if opcode is Opcode.QKV:
            self.require_adjacent(names, starts)
            self.require_biases(biases)
        for sm, queue in enumerate(self.queues):
            first, last = self.share(rows, step, sm)
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
                    num_tiles_k=_tiles_k(columns),
                    src=self.exchange[src],
                    num_src_words=columns // 2,
                    tag_delta=tag_delta,
                    norm=self.vector(norm.weight) if norm else -1,
                    bias=bias,
                    dst=self.exchange[dst],
                    row0=first * UNIT_ROWS,
                    num_rows=rows,
                    flags=flags,
                )
            )

    def share(self, rows: int, step: int, sm: int) -> tuple[int, int]:
        """First unit of an SM and of the next one; multiples of `step` units."""
        parts = _units(rows) // step
        return parts * sm // self.num_sms * step, parts * (sm + 1) // self.num_sms * step

    def find_lightest(self, block: tuple[Fused, ...]) -> list[int]:
        """SMs in the order of the tiles that a layer's linears give them: cached keys and values,
        and the work on them, go to those with the fewest.
        """
        qkv, _, out, gated, down = block
        assert isinstance(qkv, FusedLinear)
        assert isinstance(out, FusedResidual)
        assert isinstance(gated, FusedGated)
        assert isinstance(down, FusedResidual)
        gate_up = (gated.gate, gated.up)
        matrices = ((qkv.weights, 1), ((out.weight,), 1), (gate_up, 2), ((down.weight,), 1))
        load = [0] * self.num_sms
        for names, step in matrices:
            rows = sum(map(self.rows_of, names))
            for sm in range(self.num_sms):
                first, last = self.share(rows, step, sm)
                load[sm] += (last - first) * _tiles_k(self.columns[names[0]])
        return sorted(range(self.num_sms), key=lambda sm: (load[sm], sm))

    def add_attention(self, layer: int, op: FusedAttention) -> None:
        s = self.shape
        for split in range(self.max_splits):
            for head in range(s.num_kv_heads):
                sm = self.lightest[(split * s.num_kv_heads + head) % self.num_sms]
                self.queues[sm].append(
                    Attention(
                        layer=layer,
                        k_row=self.cache_row(op.k_cache, head),
                        v_row=self.cache_row(op.v_cache, head),
                        head=head,
                        split=split,
                        max_splits=self.max_splits,
                        src=self.exchange["qkv"],
                        partial=self.exchange["partial"],
                        dst=self.exchange["attended"],
                        q_norm=self.vector(op.q_norm.weight) if op.q_norm else -1,
                        k_norm=self.vector(op.k_norm.weight) if op.k_norm else -1,
                    )
                )
        for head in range(s.num_heads):
            sm = self.lightest[-1 - head % self.num_sms]
            self.queues[sm].append(
                Combine(
                    layer=layer,
                    head=head,
                    max_splits=self.max_splits,
                    partial=self.exchange["partial"],
                    dst=self.exchange["attended"],
                )
            )

    def rows_of(self, weight: str) -> int:
        tensor = self.weights.tensors[weight]
        return tensor.num_elements // self.columns[weight]

    def row_in(self, matrix: Matrix, name: str) -> int:
        row, rest = divmod(self.weights.offset(name) - matrix.offset, matrix.columns * ITEM_BYTES)
        if rest:
            raise _unfit(f"weight {name!r} between rows of its matrix")
        return row

    def cache_row(self, name: str, head: int) -> int:
        row_bytes = self.shape.head_dim * ITEM_BYTES
        return self.states.offset(name) // row_bytes + head * self.shape.max_context

    def vector(self, name: str) -> int:
        return self.weights.offset(name) // ITEM_BYTES

    def require_adjacent(self, names: tuple[str, ...], starts: list[int]) -> None:
        ends = [start + self.rows_of(name) for name, start in zip(names, starts, strict=True)]
        if starts[1:] != ends[:-1]:
            raise _unfit(f"weights {names} apart from each other")

    def require_biases(self, biases: tuple[str, ...]) -> None:
        if any(biases) and not all(biases):
            raise _unfit(f"biases {biases}")
        for one, following in pairwise(biases if all(biases) else ()):
            size = self.weights.tensors[one].num_bytes
            if self.weights.offset(one) + size != self.weights.offset(following):
                raise _unfit(f"biases {biases} apart from each other")


def _norms(op: Fused) -> list[Norm]:
    if isinstance(op, FusedAttention):
        return [norm for norm in (op.q_norm, op.k_norm) if norm]
    norm = getattr(op, "norm", None)
    return [norm] if isinstance(norm, Norm) else []


def _units(rows: int) -> int:
    return -(-rows // UNIT_ROWS)


def _tiles_k(columns: int) -> int:
    return -(-columns // TILE_K)


def _unfit(found: str) -> VerifyError:
    return VerifyError(
        f"the decode kernel can't do {found}",
        expected=f"one token, rows of a multiple of 64 elements, heads of {HEAD_DIMS}, "
        f"at most {MAX_GROUP} queries a group, no window",
        remedy="run the segment by library ops",
    )
