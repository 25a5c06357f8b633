"""The GGUF container: metadata and the place of each tensor, read in one pass over the mapped file.

Comes in: a path. Goes out: a GgufFile whose every tensor is known to lie inside the file, so that a
truncated download fails here and not in the middle of loading. Dequantisation is the package
gguf's. Next: gguf/source.py.
"""

import importlib
import mmap
import struct
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np

from distmega.errors import ModelError, counted
from distmega.models.fields import Fields, require_file
from distmega.models.weights.tensors import Array, Range

MAX_ITEMS = 2**24
"""Of an array, and bytes of a text: the largest vocabularies have 2^18 tokens."""

_STRING, _ARRAY, _FLOAT = 8, 9, 6
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
"""Value type -> struct format, as the GGUF specification numbers them."""


@cache
def _gguf() -> ModuleType:
    """The package's constants, for which a process that opens no such file need not wait."""
    return importlib.import_module("gguf.constants")


def _dequantize(box: "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]", kind: int) -> Array:
    """Rows of quantisation blocks as float32."""
    values: Array = importlib.import_module("gguf.quants").dequantize(box, kind)
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """A tensor in a GGUF file: shape in row-major order, first byte, and bytes of a row. kind: of
    the package's GGMLQuantizationType.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    row_bytes: int

    @property
    def num_rows(self) -> int:
        return self.shape[0] if len(self.shape) > 1 else 1

    @property
    def stop(self) -> int:
        return self.offset + self.num_rows * self.row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """Metadata and tensors by name; `data` is the whole file as mapped bytes."""

    path: Path
    metadata: Fields
    tensors: dict[str, GgufTensor]
    data: np.ndarray[tuple[int], np.dtype[np.uint8]]

    def read(self, tensor: GgufTensor, ranges: tuple[Range, ...]) -> Array:
        """The box of these ranges as float32: only its rows, and only the quantisation blocks
        around its columns.
        """
        block, block_bytes = _gguf().GGML_QUANT_SIZES[tensor.kind]
        rows, (start, stop) = (ranges[0] if len(ranges) > 1 else (0, 1)), ranges[-1]
        first, last = start // block, -(-stop // block)
        lines = self.data[tensor.offset : tensor.stop].reshape(tensor.num_rows, tensor.row_bytes)
        box = np.ascontiguousarray(lines[slice(*rows), first * block_bytes : last * block_bytes])
        values = _dequantize(box, tensor.kind)[:, start - first * block : stop - first * block]
        own: Array = np.require(values, np.float32, ("C", "W"))  # no part of the mapped file
        return own.reshape([upper - lower for lower, upper in ranges])


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArray:
    """A tensor of an open file, as weights.StoredArray."""

    file: GgufFile
    tensor: GgufTensor

    def read(self, ranges: tuple[Range, ...]) -> Array:
        """See GgufFile.read."""
        return self.file.read(self.tensor, ranges)


def open_gguf(path: Path) -> GgufFile:
    """Reads header, metadata and tensor table; ModelError when the file is not GGUF, truncated or
    damaged.
    """
    require_file(path)
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path}: {error}", expected="a readable GGUF file", remedy="check the path"
        ) from error
    cursor = _Cursor(path, data)
    if cursor.take(4) != b"GGUF":
        raise cursor.damaged("it does not start with GGUF", "a GGUF file")
    version = cursor.scalar("<I")
    if version not in (2, 3):
        raise cursor.damaged(f"GGUF version {version}", "version 2 or 3, little-endian")
    num_tensors, num_keys = cursor.scalar("<Q"), cursor.scalar("<Q")
    values: dict[str, object] = {}
    for _ in range(num_keys):
        key = cursor.string()
        values[key] = cursor.value(cursor.scalar("<I"))
    metadata = Fields(values, str(path))
    if (num_parts := metadata.integer("split.count", 1)) > 1:
        raise ModelError(
            f"{path} is part {metadata.integer('split.no', 0) + 1} of {num_parts}",
            expected="a model in one file",
            remedy="join them: llama-gguf-split --merge FIRST_PART FILE",
        )
    tensors = [cursor.tensor() for _ in range(num_tensors)]
    placed = _locate_tensors(cursor, tensors, metadata.integer("general.alignment", 32))
    return GgufFile(
        path=path, metadata=metadata, tensors=placed, data=np.frombuffer(data, np.uint8)
    )


def _locate_tensors(
    cursor: "_Cursor", tensors: list[GgufTensor], alignment: int
) -> dict[str, GgufTensor]:
    """Turns offsets within the data part into offsets in the file, and checks that all bytes are
    there.
    """
    if alignment < 1 or alignment.bit_count() > 1:
        raise cursor.damaged(f"alignment {alignment}", "an alignment that is a power of two")
    base = -(-cursor.position // alignment) * alignment
    placed: dict[str, GgufTensor] = {}
    for tensor in tensors:
        if tensor.offset % alignment:
            found = f"tensor {tensor.name!r} at offset {tensor.offset}"
            raise cursor.damaged(found, f"a multiple of {alignment}")
        moved = replace(tensor, offset=base + tensor.offset)
        if moved.stop > len(cursor.data):
            raise cursor.truncated(moved.stop)
        if placed.setdefault(tensor.name, moved) is not moved:
            raise cursor.damaged(f"two tensors are named {tensor.name!r}", "unique names")
    for before, after in pairwise(sorted(placed.values(), key=lambda tensor: tensor.offset)):
        if after.offset < before.stop:
            found = f"tensors {before.name!r} and {after.name!r} overlap"
            raise cursor.damaged(found, "each tensor in bytes of its own")
    for kind in {tensor.kind for tensor in tensors}:
        _check_kind(cursor, kind)
    return placed


def _check_kind(cursor: "_Cursor", kind: int) -> None:
    try:
        _dequantize(np.zeros(_gguf().GGML_QUANT_SIZES[kind][1], np.uint8), kind)
    except NotImplementedError as error:
        found = f"{cursor.path} holds tensors of type {_gguf().GGMLQuantizationType(kind).name}"
        remedy = "convert it to another quantisation, such as Q8_0 or F16"
        raise ModelError(
            found, expected="a type that the package gguf can dequantise", remedy=remedy
        ) from error


class _Cursor:
    """Reads forward through mapped bytes; running past the end is a ModelError."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.position = 0

    def take(self, num_bytes: int) -> bytes:
        """The next bytes."""
        start, self.position = self.position, self.position + num_bytes
        if self.position > len(self.data):
            raise self.truncated(self.position)
        return self.data[start : self.position]

    def scalar(self, form: str) -> int:
        """The next number in a struct format of integers."""
        (value,) = struct.unpack(form, self.take(struct.calcsize(form)))
        return int(value)

    def bounded(self, count: int, what: str) -> int:
        """The count; ModelError where it is more than a file has of them."""
        if count > len(self.data):
            raise self.truncated(self.position + count)
        if count > MAX_ITEMS:
            raise self.damaged(f"{count} {what} at byte {self.position}", f"at most {MAX_ITEMS}")
        return count

    def string(self) -> str:
        """The next string: its length in bytes, then UTF-8."""
        raw = self.take(self.bounded(self.scalar("<Q"), "bytes of text"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.damaged(f"text {raw[:40]!r} at byte {self.position}", "UTF-8") from error

    def value(self, kind: int) -> object:
        """The next metadata value of this type; floats come in their shortest decimal form."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, count = self.scalar("<I"), self.scalar("<Q")
            return self._array(item, self.bounded(count, "items"))
        if kind not in _SCALARS:
            raise self.damaged(f"value type {kind} at byte {self.position}", "a type from 0 to 12")
        (value,) = struct.unpack(_SCALARS[kind], self.take(struct.calcsize(_SCALARS[kind])))
        return float(str(np.float32(value))) if kind == _FLOAT else value

    def _array(self, item: int, count: int) -> list[object]:
        if item in _SCALARS:
            width = struct.calcsize(_SCALARS[item])
            return list(struct.unpack(f"<{count}{_SCALARS[item][1]}", self.take(count * width)))
        if item == _STRING:
            return [self.string() for _ in range(count)]
        raise self.damaged(
            f"an array of value type {item} at byte {self.position}",
            "an array of numbers or strings",
        )

    def tensor(self) -> GgufTensor:
        """The next entry of the tensor table; offset is relative to the data part."""
        name, num_dims = self.string(), self.scalar("<I")
        if not 1 <= num_dims <= 4:
            raise self.damaged(f"tensor {name!r} of {counted(num_dims, 'dim')}", "1 to 4 dims")
        shape = tuple(self.scalar("<Q") for _ in range(num_dims))[::-1]
        number, offset = self.scalar("<I"), self.scalar("<Q")
        if number not in list(_gguf().GGMLQuantizationType):
            raise self.damaged(
                f"tensor {name!r} of type {number}", "a type that the package gguf knows"
            )
        kind = _gguf().GGMLQuantizationType(number)
        block, block_bytes = _gguf().GGML_QUANT_SIZES[kind]
        if len(shape) > 2 or min(shape) < 1 or shape[-1] % block:
            raise self.damaged(
                f"tensor {name!r} of shape {shape}",
                f"a vector or matrix with rows of whole {block}s",
            )
        row_bytes = shape[-1] // block * block_bytes
        return GgufTensor(name=name, shape=shape, kind=kind, offset=offset, row_bytes=row_bytes)

    def truncated(self, wanted: int) -> ModelError:
        """The error for a file that ends too early."""
        found = f"{self.path} ends at byte {len(self.data)}"
        return ModelError(
            found, expected=f"at least {wanted} bytes", remedy="the download broke off; repeat it"
        )

    def damaged(self, found: str, expected: str) -> ModelError:
        """The error for bytes that make no sense."""
        return ModelError(
            f"{self.path}: {found}", expected=expected, remedy="download the file again"
        )
