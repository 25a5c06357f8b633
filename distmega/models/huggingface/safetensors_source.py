"""Weights of a Hugging Face folder: one or several safetensors files in, slices of their arrays as
float32 out.

A slice reads only its own bytes. Next: sources/load.py.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from distmega.errors import ModelError
from distmega.models.config import ModelConfig
from distmega.models.fields import read_json, require_file, require_target
from distmega.models.weights.tensors import (
    Array,
    Range,
    StackedArray,
    StoredArray,
    StoredReader,
    WeightSpec,
    check_stored,
    some_of,
    weight_specs,
)

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES = ("F32", "F16", "BF16")


class _Slice(Protocol):
    """What the library knows of an array before it reads it."""

    def get_shape(self) -> list[int]:
        """Extents."""

    def get_dtype(self) -> str:
        """The file's name of the element type."""

    def __getitem__(self, box: tuple[slice, ...]) -> torch.Tensor:
        """Reads a box."""


class _File(Protocol):
    """An open safetensors file."""

    def keys(self) -> list[str]:
        """Names of its arrays."""

    def get_slice(self, name: str) -> _Slice:
        """An array to be read in part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsArray:
    """One array of an open file."""

    file: _File
    name: str

    @property
    def opened(self) -> _Slice:
        """What is known of it before it is read."""
        return self.file.get_slice(self.name)

    def box(self, slices: tuple[slice, ...]) -> torch.Tensor:
        """What slices select, as stored; on the CPU, not torch's default device."""
        with torch.device("cpu"):
            return self.opened[slices]

    def read(self, ranges: tuple[Range, ...]) -> Array:
        """The box of these ranges, widened to float32."""
        part = self.box(tuple(slice(*bounds) for bounds in ranges))
        array: Array = part.to(torch.float32).numpy()
        return array


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROWS_COMPARED = 16
_PREFIX = "model."
"""Of names of all weights but the head's; the model without its head is saved without it."""


def require_tied(embedding: SafetensorsArray, head: SafetensorsArray, folder: Path) -> None:
    """ModelError where the first rows of an embedding and of the head that shares it differ."""
    rows = (slice(ROWS_COMPARED),)
    one, other = (each.box(rows) for each in (embedding, head))
    if one.shape != other.shape or not torch.equal(one, other):
        raise ModelError(
            f"{head.name} in {folder}, which is not {embedding.name}",
            expected="one matrix for both, by tie_word_embeddings: true of its config.json",
            remedy="set tie_word_embeddings to false there, or leave the head out",
        )


def no_head(missing: list[str], folder: Path) -> ModelError:
    """The error for a folder that has all weights of a model but these of its head."""
    return ModelError(
        f"{folder} holds a model without its head: it lacks {some_of(missing)}",
        expected="the weights by which it gives logits of tokens too",
        remedy="save it from its class for causal language models; or, where its embedding is its"
        " head, set tie_word_embeddings to true in config.json",
    )


def _with_prefix(
    arrays: Mapping[str, SafetensorsArray], wanted: Container[str]
) -> dict[str, SafetensorsArray]:
    """Arrays by the names of the whole model's weights, also where files leave _PREFIX out."""

    def whole_name(name: str) -> str:
        prefixed = _PREFIX + name
        lacks_it = name not in wanted and prefixed in wanted and prefixed not in arrays
        return prefixed if lacks_it else name

    return {whole_name(name): array for name, array in arrays.items()}


def read_safetensors(folder: Path, config: ModelConfig) -> dict[str, StoredReader]:
    """A reader for each weight of the configuration; ModelError when files or weights do not fit
    it.
    """
    specs = weight_specs(config).values()
    wanted = {name: shape for spec in specs for name, shape in spec.hf_arrays().items()}
    found = open_arrays(folder, ", or name its config.json itself for random weights")
    arrays = _with_prefix(found, wanted)

    def ignored(name: str) -> bool:
        return name.endswith("rotary_emb.inv_freq") or (config.tied and name == HEAD)

    if config.tied and {EMBEDDING, HEAD} <= arrays.keys():
        require_tied(arrays[EMBEDDING], arrays[HEAD], folder)
    if [*wanted.keys() - arrays.keys()] == [HEAD]:
        raise no_head([HEAD], folder)
    shapes = {name: tuple(a.opened.get_shape()) for name, a in arrays.items()}
    check_stored(wanted, shapes, ignored, str(folder))
    for name in wanted:
        dtype = arrays[name].opened.get_dtype()
        if dtype not in _DTYPES:
            raise ModelError(
                f"{arrays[name].name} in {folder} is of type {dtype}",
                expected=f"one of {', '.join(_DTYPES)}",
                remedy="convert the weights to bfloat16",
            )

    def stored(spec: WeightSpec) -> StoredArray:
        parts = tuple(arrays[name] for name in spec.hf_arrays())
        return StackedArray(parts=parts) if spec.hf_name not in arrays else parts[0]

    return {spec.name: StoredReader(spec=spec, stored=stored(spec)) for spec in specs}


def open_arrays(folder: Path, otherwise: str = "") -> dict[str, SafetensorsArray]:
    """All arrays of the folder by name: of the single file, which comes first for transformers too,
    through the index, or of whatever files there are. otherwise: what else can be done where there
    are none.
    """
    for name in (_INDEX, _SINGLE):
        require_target(folder / name)
    is_single = (folder / _SINGLE).is_file()
    if not is_single and (folder / _INDEX).is_file():
        return _open_indexed(folder)
    paths = [folder / _SINGLE] if is_single else sorted(folder.glob("*.safetensors"))
    if not paths:
        raise _no_weights(folder, otherwise)
    arrays: dict[str, SafetensorsArray] = {}
    for path in paths:
        file = _open_file(path)
        for name in file.keys():  # noqa: SIM118  (not a mapping)
            if name in arrays:
                found = f"{name} is in {path.name} and in another file of {folder}"
                raise ModelError(
                    found, expected="each weight once", remedy=f"remove one, or add {_INDEX}"
                )
            arrays[name] = SafetensorsArray(file=file, name=name)
    return arrays


def _no_weights(folder: Path, otherwise: str) -> ModelError:
    """The error for a folder without weights, or with such that may run code as they are read."""
    found, remedy = f"{folder} has no *.safetensors file", f"download the weights{otherwise}"
    if pickled := sorted(folder.glob("*.bin")):
        found += f", and {pickled[0].name} is not read, for it may hold code"
        remedy = "convert it where you trust it: read the folder by from_pretrained of transformers"
        remedy += ", and write it by save_pretrained"
    return ModelError(found, expected=f"{_SINGLE}, or shards with {_INDEX}", remedy=remedy)


def _open_indexed(folder: Path) -> dict[str, SafetensorsArray]:
    index = read_json(folder / _INDEX).mapping("weight_map")
    shards = {name: index.text(name) for name in index.data}
    for shard in sorted(set(shards.values())):
        if Path(shard).is_absolute() or ".." in Path(shard).parts or "\0" in shard:
            found = f"{folder / _INDEX} names {shard!r}, which is outside of its folder"
            remedy = "download the model from where you trust it"
            raise ModelError(found, expected="names of files in the folder", remedy=remedy)
        require_target(folder / shard)
    missing = sorted({shard for shard in shards.values() if not (folder / shard).is_file()})
    if missing:
        found = f"{folder / _INDEX} names {missing[0]!r}, which is not there"
        remedy = f"download the missing files ({len(missing)} in all)"
        raise ModelError(found, expected="every shard of the index in the folder", remedy=remedy)
    files = {shard: _open_file(folder / shard) for shard in sorted(set(shards.values()))}
    held = {shard: set(file.keys()) for shard, file in files.items()}
    for name, shard in shards.items():
        if name not in held[shard]:
            found = f"{folder / shard} does not hold {name!r}"
            remedy = "download the shard again"
            raise ModelError(found, expected=f"what {_INDEX} says", remedy=remedy)
    return {name: SafetensorsArray(file=files[shard], name=name) for name, shard in shards.items()}


def _open_file(path: Path) -> _File:
    require_file(path)
    try:
        path.open("rb").close()  # safetensors says of each file that it can't open: no such file
        return safe_open(path, framework="pt")
    except OSError as error:
        raise ModelError(
            f"{path} can't be read ({error.strerror or error})",
            expected="a readable file",
            remedy="check its permissions",
        ) from error
    except SafetensorError as error:
        raise ModelError(
            f"{path} is truncated or damaged ({error})",
            expected="a complete safetensors file",
            remedy="download it again",
        ) from error
