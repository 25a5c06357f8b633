"""A Hugging Face folder whose decoder we don't write ourselves: its configuration as an HfDecoder,
its weights straight from safetensors.

In: a folder or a config.json. Out: what sources/load.py makes a ModelSource of. Code that a folder
brings along is never run. Called by sources/locate.py and sources/load.py where our own decoders do
not cover the model; next on the walk: decoders.py.
"""

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Chunk, WeightRenaming
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from distmega.errors import CaptureError, ModelError
from distmega.models.config import ARCHITECTURES
from distmega.models.fields import read_json
from distmega.models.huggingface.safetensors_source import (
    SafetensorsArray,
    no_head,
    open_arrays,
    require_tied,
)
from distmega.models.weights.tensors import Slices, WeightReader, resolve_slices
from distmega.program.types import KNOWN
from distmega.torch_import.forms import Derived
from distmega.torch_import.huggingface.decoders import HfDecoder, open_decoder
from distmega.torch_import.huggingface.leftovers import check_leftovers

_DTYPES = ("F32", "F16", "BF16")


def read_decoder(path: Path, eos_ids: tuple[int, ...]) -> HfDecoder:
    """The decoder that a config.json describes. ModelError for a model with code of its own, for
    one that transformers does not know or can't make a decoder of, and for quantised weights.

    eos_ids: tokens that end an answer; of none, those of the configuration.
    """
    fields = read_json(path)
    kind = fields.text("model_type")
    if kind not in CONFIG_MAPPING:
        raise _unknown_type(kind, path, own_code="auto_map" in fields)
    if "quantization_config" in fields:
        raise ModelError(
            f"quantised weights in {path}",
            expected="weights in float32, float16 or bfloat16, or a GGUF file",
            remedy="use the model as it was before quantisation",
        )
    try:
        config = AutoConfig.from_pretrained(str(path), trust_remote_code=False)
        return open_decoder(config, eos_ids=eos_ids or _end_tokens(config))
    except CaptureError as error:
        raise ModelError(error.found, expected=error.expected, remedy=error.remedy) from error
    except Exception as error:  # transformers raises errors of many kinds
        reason = " ".join(str(error).split())[:300]
        raise ModelError(
            f"{path}: transformers makes no decoder of it ({type(error).__name__}: {reason})",
            expected="the configuration of a decoder, as transformers writes it",
            remedy="check config.json, or use another model",
        ) from error


def _end_tokens(config: PretrainedConfig) -> tuple[int, ...]:
    """Those of the whole model or of its decoder, also where config.json leaves them out."""
    for each in (config, config.get_text_config(decoder=True)):
        found = getattr(each, "eos_token_id", None)
        if found is not None:
            return tuple(found) if isinstance(found, list | tuple) else (found,)
    return ()


def _unknown_type(kind: str, path: Path, *, own_code: bool) -> ModelError:
    """The error for a model_type that transformers does not have."""
    known = {*ARCHITECTURES, *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    close = difflib.get_close_matches(kind, sorted(known), n=1)
    remedy = "run: pip install -U transformers, or use another model"
    if own_code:
        remedy = "such code is never run; use a model of transformers' own"
    elif close:
        remedy = f"did you mean {close[0]!r}? if not, {remedy}"
    return ModelError(
        f"model_type {kind!r} in {path}" + (", which brings code of its own" if own_code else ""),
        expected=f"one of {', '.join(ARCHITECTURES)}, or one of the other decoders of transformers"
        f" {version('transformers')}: {len(known)} in all, named in its"
        " MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
        remedy=remedy,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """A parameter in a file; it begins at `first` along `dim` of the array."""

    array: SafetensorsArray
    shape: tuple[int, ...]
    dim: int = 0
    first: int = 0

    def read(self, slices: Slices = ()) -> NDArray[np.float32]:
        """The part that `slices` select, as float32."""
        ranges = resolve_slices(self.shape, slices)
        if self.first:
            start, stop = ranges[self.dim]
            ranges[self.dim] = (start + self.first, stop + self.first)
        return self.array.read(tuple(ranges))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """A tensor that was known at capture."""

    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def read(self, slices: Slices = ()) -> NDArray[Any]:
        """The part that `slices` select; half types as float32."""
        part = self.tensor[tuple(slices)]
        half = part.dtype in (torch.bfloat16, torch.float16)
        array: NDArray[Any] = (part.float() if half else part).clone().numpy()
        return array


@dataclass(frozen=True, slots=True, kw_only=True)
class _Derived:
    """A weight that is computed of another one."""

    derived: Derived
    reader: WeightReader

    @property
    def shape(self) -> tuple[int, ...]:
        return self.derived.shape

    def read(self, slices: Slices = ()) -> NDArray[Any]:
        """The part that `slices` select."""
        return self.derived.read(self.reader, slices)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ListedExperts:
    """A matrix an expert [e, n, k], of files that hold each expert's parts of n apart."""

    experts: tuple[tuple[_Stored, ...], ...]
    shape: tuple[int, ...]

    def read(self, slices: Slices = ()) -> NDArray[Any]:
        """The part that `slices` select."""
        wanted, rows, columns = (*slices, *[slice(None)] * (3 - len(slices)))
        chosen = self.experts[wanted]
        wholes = (np.concatenate([part.read((slice(None), columns)) for part in parts])
                  for parts in chosen)  # fmt: skip
        return np.stack([whole[rows] for whole in wholes])


_PARTS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
"""Matrices of all experts in one parameter -> what files call an expert's parts of it."""


def _find_experts(
    name: str, shape: tuple[int, ...], find: Callable[[str], _Stored | None]
) -> _ListedExperts | None:
    """A parameter of all experts by the parts of each; None where files do not have it so."""
    owner, _, last = name.rpartition(".")
    for parts in _PARTS.get(last, ()):
        found = [
            [find(f"{owner}.{expert}.{part}.weight") for part in parts]
            for expert in range(shape[0])
        ]
        there = [tuple(each for each in one if each is not None) for one in found]
        rows = {sum(part.shape[0] for part in one) for one in there}
        columns = {part.shape[1:] for one in there for part in one}
        if all(len(one) == len(parts) for one in there) and (rows, columns) == (
            {shape[1]}, {shape[2:]}
        ):  # fmt: skip
            return _ListedExperts(experts=tuple(there), shape=shape)
    return None


@dataclass(frozen=True, slots=True, eq=False)
class Readers(Mapping[str, Any]):
    """A reader for each weight of the programs that a decoder has built so far."""

    decoder: HfDecoder
    stored: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        if name.startswith(KNOWN):
            return _Known(tensor=self.decoder.constants[name])
        if name in self.decoder.derived:
            derived = self.decoder.derived[name]
            return _Derived(derived=derived, reader=self[derived.source])
        return self.stored[self.decoder.targets[name]]

    def __iter__(self) -> Iterator[str]:
        yield from (*self.decoder.targets, *self.decoder.constants, *self.decoder.derived)

    def __len__(self) -> int:
        return len(list(iter(self)))


def _names_in_files(
    model: torch.nn.Module, prefix: str, arrays: Mapping[str, Any]
) -> dict[str, str]:
    """Name of a tensor, as the files have it or as transformers changes it for the class -> its
    name in the files. Classes call some weights otherwise than their published files do, and those
    of the model without its head lack the prefix.
    """
    conversions = get_model_conversion_mapping(model)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    changed: dict[str, str] = {}
    for name in arrays:
        new = name
        for renaming in renamings:
            new, _ = renaming.rename_source_key(new)
        changed[new] = name
    found = changed | {name: name for name in arrays}
    return {prefix + name: array_name for name, array_name in found.items()} | found


def _chunks_in_files(
    model: torch.nn.Module, in_files: Mapping[str, str], arrays: Mapping[str, Any]
) -> dict[str, _Stored]:
    """Parameters that files hold side by side in one array, where transformers cuts it into equal
    chunks.
    """
    found: dict[str, _Stored] = {}
    for converter in get_model_conversion_mapping(model):
        operations: Sequence[Any] = getattr(converter, "operations", ())
        targets = converter.target_patterns
        if [*map(type, operations)] != [Chunk] or len(targets) < 2:
            continue
        dim = operations[0].dim
        for name, array_name in in_files.items():
            first, pattern = converter.rename_source_key(name)
            whole = None if pattern is None else _stored(arrays, array_name)
            if whole is None or whole.shape[dim] % len(targets):
                continue
            shape = [*whole.shape]
            shape[dim] //= len(targets)
            for number, target in enumerate(targets):
                found[first.replace(targets[0], target, 1)] = _Stored(
                    array=whole.array, shape=tuple(shape), dim=dim, first=number * shape[dim]
                )
    return found


def _stored(arrays: Mapping[str, Any], name: str) -> _Stored | None:
    """A tensor of the files, in a type that is read; None where they have none."""
    array = arrays.get(name)
    if array is None or array.opened.get_dtype() not in _DTYPES:
        return None
    return _Stored(array=array, shape=tuple(array.opened.get_shape()))


def read_weights(folder: Path, decoder: HfDecoder) -> Readers:
    """Readers of the parameters of a folder's model. ModelError where some are missing or have
    other shapes, where tied ones differ, and for what none of its layers uses.
    """
    arrays = open_arrays(folder)
    model = decoder.model(decoder.dtype)
    buffers = {n: x for n, x in model.state_dict().items() if n in dict(model.named_buffers())}
    held = {**dict(model.named_parameters(remove_duplicate=False)), **buffers}
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    in_files = _names_in_files(model, prefix, arrays)
    chunks = _chunks_in_files(model, in_files, arrays)
    same: dict[int, list[str]] = {}
    for name, tensor in held.items():
        same.setdefault(id(tensor), []).append(name)
    stored: dict[str, Any] = {}
    missing: list[str] = []
    used: set[str] = set()
    for name, tensor in held.items():
        names = [name, *same[id(tensor)]]
        found = next((in_files[each] for each in names if each in in_files), None)
        if found is None and name in buffers:
            stored[name] = _Known(tensor=tensor)
            continue
        chunk = next((chunks[each] for each in names if each in chunks), None)
        if found is None and chunk is not None and chunk.shape == tuple(tensor.shape):
            stored[name] = chunk
            used.add(chunk.array.name)
            continue
        if found is None:
            experts = _find_experts(
                name, tuple(tensor.shape), lambda each: _stored(arrays, in_files.get(each, each))
            )
            if experts is None:
                missing.append(name)
            else:
                stored[name] = experts
                used |= {part.array.name for parts in experts.experts for part in parts}
            continue
        used.add(found)
        array = arrays[found]
        shape = tuple(array.opened.get_shape())
        dtype = array.opened.get_dtype()
        if shape != tuple(tensor.shape) or dtype not in _DTYPES:
            raise ModelError(
                f"{found} in {folder} is {dtype}{list(shape)}",
                expected=f"{', '.join(_DTYPES)} of {list(tensor.shape)}",
                remedy="check that the configuration belongs to these weights",
            )
        stored[name] = _Stored(array=array, shape=shape)
    in_head = {name for name in held if not name.startswith(prefix)}
    if missing and {*missing} <= in_head < held.keys():
        raise no_head(missing, folder)
    if missing:
        raise ModelError(
            f"{folder} lacks {len(missing)} of {len(held)} weights: {', '.join(missing[:3])}",
            expected="all weights of the configuration",
            remedy="check that the configuration belongs to these weights, or download them again",
        )
    for names in same.values():
        tied = [*dict.fromkeys(in_files[each] for each in names if each in in_files)]
        for other in tied[1:]:
            require_tied(arrays[tied[0]], arrays[other], folder)
    unused: dict[str, list[str]] = {}
    for name, array_name in in_files.items():
        if array_name not in used:
            unused.setdefault(array_name, []).append(name)
    check_leftovers(model, prefix, unused, arrays, folder)
    return Readers(decoder, stored)
