"""Launches of the norm kernels: rows become tiles of a descriptor, a choice is made, and TMA or
plain Triton runs it.

In: CUDA tensors of float types, the last dim being the row. Out: results and sums, contiguous.
Next: api.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from distmega.kernels.pipelined.blocks import common_width, padded_to
from distmega.kernels.pipelined.choices import (
    KernelChoice,
    Traffic,
    plain_row_choices,
    row_choices,
)
from distmega.kernels.pipelined.device import INT32, device_facts, num_programs
from distmega.kernels.pipelined.families import (
    Block,
    Launch,
    LaunchFamily,
    LaunchPair,
    Vector,
    pointer,
)
from distmega.kernels.pipelined.norms.long_rows import (
    CHUNK_BYTES,
    LongRowSpec,
    long_rows_gather,
    long_rows_whole,
    long_rows_write,
)
from distmega.kernels.pipelined.norms.norm_kernel import NormSpec, norm_kernel
from distmega.kernels.pipelined.pointwise.views import as_rows, layout_key, result_key
from distmega.kernels.pipelined.triton_path import norm_plain
from distmega.kernels.runtime.gpus import is_hopper
from distmega.kernels.runtime.memory import has_tma_rows

Operands = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor, Tensor | None]
"""x, residual, weight, bias, results and sums; x, residual, results and sums of one shape, the last
two contiguous; sums where there is a residual.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _NormClass:
    """What calls have in common that share launches: rows of x and residual by (row, element)
    strides, vectors by their steps, None where there is none; types of what comes and leaves, and
    whether it begins at a multiple of 16 bytes.
    """

    op: str
    eps: float
    count: int
    columns: int
    x: tuple[int, int]
    residual: tuple[int, int] | None
    weight: int | None
    bias: int | None
    types: tuple[torch.dtype, ...]
    aligned: tuple[bool, ...]
    index: int

    @property
    def sizes(self) -> list[int]:
        return [dtype.itemsize for dtype in self.types]

    @property
    def traffic(self) -> Traffic:
        arriving = 1 if self.residual is None else 2
        return Traffic(
            in_bytes=sum(self.sizes[:arriving]),
            out_bytes=sum(self.sizes[arriving:]),
            num_elements=self.count * self.columns,
        )

    @property
    def name(self) -> str:
        """The shape class: number of rows up to the next power of two."""
        parts = " weight" * (self.weight is not None) + " bias" * (self.bias is not None)
        types = " ".join(str(dtype).removeprefix("torch.") for dtype in self.types)
        return f"{self.op}{parts}, {types}, {padded_to(self.count)}x{self.columns}"

    @property
    def _packed(self) -> bool:
        return all(rows in (None, (self.columns, 1)) for rows in (self.x, self.residual))

    @property
    def vectors(self) -> list[Vector]:
        steps = (self.weight, self.bias)
        return [Vector(length=self.columns, step=1 if step is None else step) for step in steps]

    def launch(self, choice: KernelChoice) -> Launch | LaunchPair:
        if choice.stages:
            return self.tma_launch(choice)
        return self.long_launch(choice) if choice.parts else self.plain_launch(choice)

    def tma_launch(self, choice: KernelChoice) -> Launch:
        """The Gluon kernel for whole rows."""
        width = common_width(self.sizes, self.columns)
        tile = (choice.tile[0], choice.tile[1] // width, width)
        spec = NormSpec(
            op=self.op,
            has_residual=self.residual is not None,
            has_weight=self.weight is not None,
            has_bias=self.bias is not None,
            rows=tile[0],
            groups=tile[1],
            width=width,
            exact=choice.tile[1] == self.columns,
            stages=choice.stages,
            buffers=choice.buffers,
        )

        def block(row: int) -> Block:
            shape = (self.count, self.columns // width, width)
            return Block(shape=shape, strides=(row, width, 1), tile=tile)

        leaving = block(self.columns)
        num_tiles = -(-self.count // tile[0])
        return Launch(
            kernel=norm_kernel,
            arguments=(
                block(self.x[0]), block((self.residual or self.x)[0]), *self.vectors,
                leaving, leaving,
            ),
            rest=(self.columns, num_tiles, choice.run, self.eps, spec),
            grid=num_programs(choice, num_tiles, self.index),
            options={"num_warps": choice.num_warps, "maxnreg": choice.max_registers},
        )  # fmt: skip

    def plain_launch(self, choice: KernelChoice) -> Launch:
        """The plain Triton kernel for whole rows."""
        rows, tile = choice.tile
        strides = (*self.x, *(self.residual or (0, 0)))
        rest: tuple[object, ...] = (
            *strides,
            self.count,
            self.columns,
            self.eps,
            self.op,
            rows,
            tile,
            choice.vectors,
            self._packed and tile == self.columns and self.count % rows == 0,
            self._early,
        )
        return Launch(
            kernel=norm_plain,
            arguments=(pointer, pointer, *self.vectors, pointer, pointer),
            rest=rest,
            grid=-(-self.count // rows),
            options={"num_warps": choice.num_warps, "launch_pdl": self._early},
        )

    def long_launch(self, choice: KernelChoice) -> Launch | LaunchPair:
        """The plain Triton kernels for rows longer than a tile."""
        spec = self._long_spec(choice)
        rows = (*self.x, *(self.residual or (0, 0)))
        options: dict[str, object] = {"num_warps": choice.num_warps, "launch_pdl": self._early}
        if choice.parts == 1:
            return Launch(
                kernel=long_rows_whole,
                arguments=(pointer, pointer, *self.vectors, pointer, pointer),
                rest=(*rows, self.columns, self.eps, spec),
                grid=self.count,
                options=options,
            )
        programs = self.count * choice.parts
        num_chunks = -(-self.columns // spec.vector)
        rest = (*rows, self.columns, choice.parts, -(-num_chunks // choice.parts))
        gather = Launch(
            kernel=long_rows_gather,
            arguments=(pointer,) * 5,
            rest=(*rest, spec),
            grid=programs,
            options=options,
        )
        write = Launch(
            kernel=long_rows_write,
            arguments=(pointer, pointer, *self.vectors, *(pointer,) * 3),
            rest=(*rest, self.eps, spec),
            grid=programs,
            options=options,
        )
        return LaunchPair(
            launches=(gather, write),
            tensors=((0, 1, 4, 5), (0, 1, 2, 3, 4, 5)),
            between=3 * programs,
        )

    def _long_spec(self, choice: KernelChoice) -> LongRowSpec:
        result = 1 if self.residual is None else 2
        vector = CHUNK_BYTES // self.sizes[result]
        threads = 32 * choice.num_warps

        def is_wide(number: int, rows: tuple[int, int]) -> bool:
            """Whether rows of an operand lie to multiples of 16 bytes as those of the results."""
            same = self.sizes[number] == self.sizes[result] and rows[1] == 1
            apart = (rows[0] - self.columns) % vector if self.count > 1 else 0
            return same and apart == 0 and self.aligned[number] and self.aligned[result]

        x_wide = is_wide(0, self.x)
        residual_wide = self.residual is None or is_wide(1, self.residual)
        # of narrow rows each chunk is several loads
        loads = choice.tile[1] // (vector * threads) if x_wide and residual_wide else 1
        return LongRowSpec(
            op=self.op,
            threads=threads,
            loads=loads,
            vector=vector,
            even=self.aligned[result] and self.columns % vector == 0,
            x_wide=x_wide,
            residual_wide=residual_wide,
            sums_wide=self.residual is None or is_wide(-1, (self.columns, 1)),
            early=self._early,
            parts=padded_to(choice.parts),
        )

    @property
    def _early(self) -> bool:
        """Whether plain launches may begin before what came before them ends: no kernel that starts
        so waits for a peer, so whatever it stands behind ends by itself.
        """
        return is_hopper(self.index)


_families: dict[object, LaunchFamily | None] = {}


def run_norm(op: str, eps: float, operands: Operands) -> None:
    """Writes the results, and sums where there is a residual. op: rms, layer or softmax."""
    if not operands[0].numel():
        return
    family = family_of(op, eps, operands)
    if family is None:
        x, residual, *rest = operands
        residual = None if residual is None else residual.contiguous()
        operands = (x.contiguous(), residual, *rest)  # type: ignore[assignment]
        family = family_of(op, eps, operands)
        assert family is not None, "contiguous tensors are rows"
    family.run(operands)


def family_of(op: str, eps: float, operands: Operands) -> LaunchFamily | None:
    """The launches for such operands; None where x or the residual is no matrix of rows."""
    given, results = map(layout_key, operands[:4]), map(result_key, operands[4:])
    key = (op, eps, operands[0].device.index, *given, *results)
    if key not in _families:
        _families[key] = _make_family(op, eps, operands)
    return _families[key]


def _make_family(op: str, eps: float, operands: Operands) -> LaunchFamily | None:
    x, residual, weight, bias, y, total = operands
    moved: list[tuple[Tensor, tuple[int, int]]] = []
    for given in (x, residual, y, total):
        if given is not None:
            strides = as_rows(given.shape, given.stride())
            if strides is None:
                return None
            moved.append((given, strides))
    made = _NormClass(
        op=op,
        eps=eps,
        count=x.numel() // x.shape[-1],
        columns=x.shape[-1],
        x=moved[0][1],
        residual=None if residual is None else moved[1][1],
        weight=None if weight is None else weight.stride(0),
        bias=None if bias is None else bias.stride(0),
        types=tuple(given.dtype for given, _ in moved),
        aligned=tuple(given.data_ptr() % CHUNK_BYTES == 0 for given, _ in moved),
        index=x.device.index,
    )
    sizes = made.count, made.columns, made.traffic, device_facts(made.index)
    if _takes_tma(made) and all(
        step == 1 and has_tma_rows(t, row, made.columns) for t, (row, step) in moved
    ):
        choices = row_choices(*sizes)
    else:
        choices = plain_row_choices(*sizes)
    return LaunchFamily(made.name, choices, made.launch)


def _takes_tma(made: _NormClass) -> bool:
    """Whether the Gluon kernels run there for rows of such types and lengths."""
    width = common_width(made.sizes, made.columns)
    return is_hopper(made.index) and width > 0 and made.count < INT32
