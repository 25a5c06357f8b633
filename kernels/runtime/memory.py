"""Arenas as torch memory: one flat byte tensor a space, and views into it; and what callers give,
brought to where kernels can read it.

In: layouts and operands of arena.py. Out: tensors that share the arena's storage. Whoever allocates
an arena loads weights straight into its views; library ops and megakernels then work on the same
memory. Next on the walk: ../isa/reference.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from distmega.errors import RequestError
from distmega.hostir.library.torch_types import torch_dtype
from distmega.kernels.runtime.arena import ALIGNMENT_BYTES, ArenaLayout, Operand
from distmega.program import types as program
from distmega.program.dtypes import item_bytes
from distmega.program.types import packed_strides

ACCESS_BYTES = 16
"""Widest access of a thread, and what TMA takes: memory that is read so begins at a multiple."""


def allocate_arena(layout: ArenaLayout, copies: int = 1, device: str = "cpu") -> Tensor:
    """Zeroed memory for an arena, a flat uint8 tensor aligned as its tensors need; never empty.

    RequestError where the device hasn't so much.
    """
    num_bytes = max(layout.num_bytes * copies, ALIGNMENT_BYTES)
    try:
        raw = torch.zeros(num_bytes + ALIGNMENT_BYTES, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        raise RequestError(
            f"{num_bytes / 1e9:.1f} GB for the {layout.space.name.lower()} arena of a rank",
            expected=f"memory for it on {device}",
            remedy="use more ranks, a smaller batch, a shorter context or a smaller model",
        ) from error
    start = -raw.data_ptr() % ALIGNMENT_BYTES
    return raw[start : start + num_bytes]


def arena_views(layout: ArenaLayout, arena: Tensor) -> dict[str, Tensor]:
    """The tensors of an arena by name, as views of its memory."""
    return {
        name: typed_view(
            arena, tensor.dtype, layout.offset(name), 0, tensor.shape, packed_strides(tensor.shape)
        )
        for name, tensor in layout.tensors.items()
    }


def spanning_view(layout: ArenaLayout, arena: Tensor, tensor: program.Tensor, first: str) -> Tensor:
    """What begins where tensor `first` of the arena does and may reach over those behind it."""
    strides = packed_strides(tensor.shape)
    return typed_view(arena, tensor.dtype, layout.offset(first), 0, tensor.shape, strides)


def copy_ids(ids: Tensor, bound: int | None, *, out: Tensor) -> None:
    """Ids into int32 `out`, both [n], in one launch, for a kernel that looks them up unseen: those
    that aren't from 0 to bound - 1 become some that are. bound: None where none is known.
    """
    if bound is None:
        out.copy_(ids)
    else:
        torch.remainder(ids, bound, out=out)


def packed(x: Tensor, num_bytes: int = ACCESS_BYTES) -> Tensor:
    """x in row-major order, where words of so many bytes can be read; a copy of what lies otherwise
    or elsewhere.
    """
    x = x.contiguous()
    shifted = x.data_ptr() % num_bytes or x.storage_offset() * x.element_size() % num_bytes
    return x.clone() if shifted else x


def has_tma_rows(x: Tensor, stride: int | None = None, length: int | None = None) -> bool:
    """Whether TMA can address x [rows, columns] as it lies, or as rows of `length` elements,
    `stride` elements apart: the first and their distance are multiples of 16 bytes, elements lie
    side by side, and no row lies in another, as all of an expanded tensor do.
    """
    if stride is None or length is None:
        if x.stride(1) != 1:
            return False
        stride, length = x.stride(0), x.shape[1]
    starts = x.data_ptr(), stride * x.element_size()
    return stride >= length and not any(start % ACCESS_BYTES for start in starts)


def tma_rows(x: Tensor) -> Tensor:
    """x [rows, columns], or a copy of it that TMA can address where a row is a multiple of 16
    bytes.
    """
    return x if has_tma_rows(x) else x.clone(memory_format=torch.contiguous_format)


def operand_view(arenas: Sequence[Tensor], operand: Operand) -> Tensor:
    """A tensor of a segment, views included, as a view of the arena it lies in; arenas in the order
    of Space.
    """
    arena = arenas[operand.space]
    return typed_view(
        arena, operand.dtype, operand.offset_bytes, operand.first, operand.shape, operand.strides
    )


def typed_view(
    arena: Tensor,
    dtype: str,
    offset_bytes: int,
    first: int,
    shape: Sequence[int],
    strides: Sequence[int],
) -> Tensor:
    """A view of an arena that begins `first` elements behind offset_bytes; strides: in elements."""
    flat = arena.view(torch_dtype(dtype))
    offset = offset_bytes // item_bytes(dtype) + first + flat.storage_offset()
    return flat.as_strided(tuple(shape), tuple(strides), offset)
