"""Weights that are computed of stored ones when these are read: rows in another order, a matrix
turned, an expression of each element.

In: a stored weight's name. Out: a Derived, whose `read` takes the part that a rank wants from the
stored weight's reader. Used by the passes, and by ../huggingface/source.py for reading.
"""

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from distmega.hostir.library.pointwise import pointwise
from distmega.hostir.library.torch_types import torch_dtype
from distmega.kernels.tasks.fuse import substitute
from distmega.models.weights.tensors import Slices, WeightReader, resolve_slices
from distmega.program.expr import parse


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """expression(stored, turned if so, its rows at `rows`).

    source: the stored weight; stored, stored_dtype: its shape and type. rows: along the first dim
    after turning; None for all as they are. text: of a0, "" for the element itself. to_dtype: of
    the result, "" for the stored one.
    """

    source: str
    stored: tuple[int, ...]
    stored_dtype: str
    turned: bool = False
    rows: tuple[int, ...] | None = None
    text: str = ""
    to_dtype: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the result."""
        shape = self.stored[::-1] if self.turned else self.stored
        return shape if self.rows is None else (len(self.rows), *shape[1:])

    @property
    def dtype(self) -> str:
        """Of the result."""
        return self.to_dtype or self.stored_dtype

    @property
    def name(self) -> str:
        """Of the source, and what tells it from others of the same one."""
        what = repr((self.turned, self.rows, self.text, self.to_dtype))
        return f"{self.source}@{hashlib.sha256(what.encode()).hexdigest()[:8]}"

    def turn(self) -> "Derived":
        """This one with its two dims in turn."""
        assert len(self.stored) == 2
        assert self.rows is None
        return replace(self, turned=not self.turned)

    def take(self, rows: tuple[int, ...]) -> "Derived":
        """Rows of this one."""
        if self.rows is not None:
            rows = tuple(self.rows[row] for row in rows)
        whole = self.stored[-1] if self.turned else self.stored[0]
        return replace(self, rows=None if rows == tuple(range(whole)) else rows)

    def apply(self, text: str, dtype: str) -> "Derived":
        """An expression of a0 of this one, in another type."""
        if self.text:
            text = str(substitute(parse(text), [parse(self.text)]))
        return replace(self, text=text, to_dtype="" if dtype == self.stored_dtype else dtype)

    def of(self, stored: torch.Tensor) -> torch.Tensor:
        """The whole of it, from all of the stored weight."""
        out = stored.T if self.turned else stored
        out = out if self.rows is None else out[list(self.rows)]
        if not self.text:
            return out.contiguous()
        return pointwise(parse(self.text), [out], torch_dtype(self.dtype))

    def read(self, reader: WeightReader, slices: Slices = ()) -> NDArray[Any]:
        """The part of it that `slices` select, of no more of the stored weight than it takes."""
        first, *others = (slice(*bounds) for bounds in resolve_slices(self.shape, slices))
        rows = np.arange(self.shape[0]) if self.rows is None else np.asarray(self.rows)
        rows = rows[first]
        span = slice(int(rows.min()), int(rows.max()) + 1)
        wanted = (span, *others)
        part = reader.read(wanted[::-1] if self.turned else wanted)
        part = (part.T if self.turned else part)[rows - span.start]
        if not self.text:
            return np.ascontiguousarray(part)
        found = pointwise(parse(self.text), [torch.from_numpy(part).float()], torch.float32)
        array: NDArray[Any] = found.numpy()
        return array
