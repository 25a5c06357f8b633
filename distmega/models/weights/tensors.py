"""The decoder's weights by name: logical shape, and where a Hugging Face or a GGUF file keeps each.

One table says everything: `wq` is logically [h, g, d, k] and stored as a matrix of (h g d) rows and
k columns. A WeightReader gives any slice of a logical weight as float32; StoredReader does it over
the matrices of a file, reading only the rows and columns that the slice touches. The sources are
safetensors_source.py, gguf/source.py and random_source.py.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from distmega.errors import ModelError, counted
from distmega.models.config import ModelConfig
from distmega.models.rope import rope_table

Array = NDArray[np.float32]
Slices = tuple[slice, ...]
Range = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSpec:
    """One weight: `dims` are the letters of ModelConfig.extents, one group a dim of the stored
    array. A Hugging Face name with {} is of one array for each index of the first dim.
    """

    name: str
    dims: tuple[tuple[str, ...], ...]
    shape: tuple[int, ...]
    stored_shape: tuple[int, ...]
    hf_name: str
    gguf_name: str

    def hf_arrays(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the arrays that a Hugging Face folder keeps it in."""
        if "{}" not in self.hf_name:
            return {self.hf_name: self.stored_shape}
        names = (self.hf_name.format(n) for n in range(self.stored_shape[0]))
        return dict.fromkeys(names, self.stored_shape[1:])


_MODEL = (
    ("embed", "v, k", "model.embed_tokens.weight", "token_embd.weight"),
    ("head", "v, k", "lm_head.weight", "output.weight"),
    ("norm", "k", "model.norm.weight", "output_norm.weight"),
)
_LAYER = (
    ("attn_norm", "k", "input_layernorm.weight", "attn_norm.weight"),
    ("wq", "h g d, k", "self_attn.q_proj.weight", "attn_q.weight"),
    ("wk", "h d, k", "self_attn.k_proj.weight", "attn_k.weight"),
    ("wv", "h d, k", "self_attn.v_proj.weight", "attn_v.weight"),
    ("wo", "k, h g d", "self_attn.o_proj.weight", "attn_output.weight"),
    ("bq", "h g d", "self_attn.q_proj.bias", "attn_q.bias"),
    ("bk", "h d", "self_attn.k_proj.bias", "attn_k.bias"),
    ("bv", "h d", "self_attn.v_proj.bias", "attn_v.bias"),
    ("bo", "k", "self_attn.o_proj.bias", "attn_output.bias"),
    ("q_norm", "d", "self_attn.q_norm.weight", "attn_q_norm.weight"),
    ("k_norm", "d", "self_attn.k_norm.weight", "attn_k_norm.weight"),
    ("ffn_norm", "k", "post_attention_layernorm.weight", "ffn_norm.weight"),
    ("w_gate", "f, k", "mlp.gate_proj.weight", "ffn_gate.weight"),
    ("w_up", "f, k", "mlp.up_proj.weight", "ffn_up.weight"),
    ("w_down", "k, f", "mlp.down_proj.weight", "ffn_down.weight"),
    ("b_gate", "f", "mlp.gate_proj.bias", "ffn_gate.bias"),
    ("b_up", "f", "mlp.up_proj.bias", "ffn_up.bias"),
    ("b_down", "k", "mlp.down_proj.bias", "ffn_down.bias"),
    ("router", "e, k", "mlp.gate.weight", "ffn_gate_inp.weight"),
    ("expert_gate", "e, j, k", "mlp.experts.{}.gate_proj.weight", "ffn_gate_exps.weight"),
    ("expert_up", "e, j, k", "mlp.experts.{}.up_proj.weight", "ffn_up_exps.weight"),
    ("expert_down", "e, k, j", "mlp.experts.{}.down_proj.weight", "ffn_down_exps.weight"),
    ("shared_router", "o, k", "mlp.shared_expert_gate.weight", "ffn_gate_inp_shexp.weight"),
    ("shared_gate", "s, k", "mlp.shared_expert.gate_proj.weight", "ffn_gate_shexp.weight"),
    ("shared_up", "s, k", "mlp.shared_expert.up_proj.weight", "ffn_up_shexp.weight"),
    ("shared_down", "k, s", "mlp.shared_expert.down_proj.weight", "ffn_down_shexp.weight"),
)
"""Name, dims, Hugging Face name, GGUF name; those of a layer come after model.layers.N. and blk.N.
"""


_FFN_BIASES = frozenset({"b_gate", "b_up", "b_down"})
_FFN = frozenset({"w_gate", "w_up", "w_down"}) | _FFN_BIASES
_EXPERTS = frozenset({"router", "expert_gate", "expert_up", "expert_down"})
_SHARED = frozenset({"shared_router", "shared_gate", "shared_up", "shared_down"})

_MIXTRAL_NAMES = {
    "router": "block_sparse_moe.gate.weight",
    "expert_gate": "block_sparse_moe.experts.{}.w1.weight",
    "expert_up": "block_sparse_moe.experts.{}.w3.weight",
    "expert_down": "block_sparse_moe.experts.{}.w2.weight",
}
"""What this family calls some weights in its own way."""


def weight_specs(config: ModelConfig) -> dict[str, WeightSpec]:
    """All weights that a model of this configuration has in its files, by name: everything but
    rope_table.
    """
    return {spec.name: spec for spec in _specs(config)}


def _specs(config: ModelConfig) -> Iterator[WeightSpec]:
    extents = config.extents()
    absent = {"head"} if config.tied else set()
    absent |= set() if config.qkv_bias else {"bq", "bk", "bv"}
    absent |= set() if config.out_bias else {"bo"}
    absent |= set() if config.ffn_bias else _FFN_BIASES
    absent |= set() if config.qk_norm else {"q_norm", "k_norm"}
    absent |= set() if config.shared_ffn else _SHARED
    own = _MIXTRAL_NAMES if config.architecture == "mixtral" else {}
    for name, dims, hf_name, gguf_name in _MODEL:
        if name not in absent:
            yield _spec(name, dims, hf_name, gguf_name, extents)
    for layer in range(config.num_layers):
        sparse = config.has_experts(layer)
        missing = absent | (_FFN if sparse else _EXPERTS | _SHARED)
        for name, dims, hf_name, gguf_name in _LAYER:
            if name not in missing:
                hf_name = f"model.layers.{layer}.{own.get(name, hf_name)}"
                gguf_name = f"blk.{layer}.{gguf_name}"
                if config.qk_norm_whole and name in ("q_norm", "k_norm"):
                    dims = "a" if name == "q_norm" else "b"
                yield _spec(f"layers.{layer}.{name}", dims, hf_name, gguf_name, extents)


def _spec(
    name: str, dims: str, hf_name: str, gguf_name: str, extents: dict[str, int]
) -> WeightSpec:
    groups = tuple(tuple(group.split()) for group in dims.split(","))
    return WeightSpec(
        name=name,
        dims=groups,
        shape=tuple(extents[letter] for group in groups for letter in group),
        stored_shape=tuple(math.prod(extents[letter] for letter in group) for group in groups),
        hf_name=hf_name,
        gguf_name=gguf_name,
    )


_CHECK = "check that the configuration belongs to these weights, or download them again"


def check_stored(
    wanted: Mapping[str, tuple[int, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    ignored: Callable[[str], bool],
    where: str,
) -> None:
    """Raises ModelError unless the arrays in a file are the weights wanted, by stored name and
    shape, and no others.

    ignored: says which further arrays are known to hold nothing that the decoder needs.
    """
    missing = [name for name in wanted if name not in shapes]
    if missing:
        found = f"{where} lacks {len(missing)} of {len(wanted)} weights: {some_of(missing)}"
        raise ModelError(found, expected="all weights of the configuration", remedy=_CHECK)
    for name, shape in wanted.items():
        if shapes[name] != shape:
            found = f"{name} in {where} has shape {list(shapes[name])}"
            raise ModelError(found, expected=str(list(shape)), remedy=_CHECK)
    require_used([name for name in shapes if name not in wanted and not ignored(name)], where)


def require_used(stray: list[str], where: str) -> None:
    """ModelError for arrays of a file that are no weights of the model."""
    if stray:
        count = counted(len(stray), "weight")
        found = f"{where} holds {count} that the model does not use: {some_of(stray)}"
        raise ModelError(found, expected="only weights of the configuration", remedy=_CHECK)


def some_of(names: list[str]) -> str:
    """The first of these, for a message."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


class WeightReader(Protocol):
    """A weight that can be read in part."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape."""

    def read(self, slices: Slices = ()) -> Array:
        """The part that `slices` (steps of 1, one a dim, missing ones full) select, float32, owned
        by the caller.
        """


class StoredArray(Protocol):
    """A vector or matrix as a file holds it."""

    def read(self, ranges: tuple[Range, ...]) -> Array:
        """The box of these half-open ranges, one a stored dim, as float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedArray:
    """Arrays of equal shapes as one, along a dim in front of theirs."""

    parts: tuple[StoredArray, ...]

    def read(self, ranges: tuple[Range, ...]) -> Array:
        """The box of these ranges; of arrays outside of it nothing is read."""
        (start, stop), *inner = ranges
        return np.stack([part.read(tuple(inner)) for part in self.parts[start:stop]])


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredReader:
    """Reads a logical weight from a stored array.

    interleaved: the file orders each head's rows for interleaved rotary pairs (0, 1), (2, 3), ...
    as GGUF files of architecture llama do; reading puts them in half-split order.
    """

    spec: WeightSpec
    stored: StoredArray
    interleaved: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    def read(self, slices: Slices = ()) -> Array:
        """Reads the stored box around the slice, then cuts what sticks out."""
        wanted = resolve_slices(self.shape, slices)
        if any(start >= stop for start, stop in wanted):
            return np.empty([max(stop - start, 0) for start, stop in wanted], np.float32)
        ranges, box_shape, cut = [], [], []
        dim = 0
        for group in self.spec.dims:
            start, stop = wanted[dim]
            inner = self.shape[dim + 1 : dim + len(group)]
            ranges.append((start * math.prod(inner), stop * math.prod(inner)))
            box_shape += [stop - start, *inner]
            cut += [slice(None), *(slice(*bounds) for bounds in wanted[dim + 1 : dim + len(group)])]
            dim += len(group)
        box = self.stored.read(tuple(ranges)).reshape(box_shape)
        if self.interleaved:
            box = _split_halves(box, self.spec.dims[0].index("d"))
        return np.ascontiguousarray(box[tuple(cut)])


def _split_halves(box: Array, dim: int) -> Array:
    """Rows 0, 2, 4, ... of a head and then 1, 3, 5, ...: interleaved rotary pairs become (i, i +
    d/2).
    """
    extent = box.shape[dim]
    order = np.concatenate([np.arange(0, extent, 2), np.arange(1, extent, 2)])
    return np.take(box, order, axis=dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeTableReader:
    """The weight rope_table: computed, [max_positions, head_dim]; a program with a shorter context
    reads the first rows.
    """

    config: ModelConfig

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.config.max_positions, self.config.head_dim)

    def read(self, slices: Slices = ()) -> Array:
        """Computes the rows asked for."""
        (start, stop), columns = resolve_slices(self.shape, slices)
        return np.ascontiguousarray(rope_table(self.config, start, stop)[:, slice(*columns)])


def resolve_slices(shape: tuple[int, ...], slices: Slices) -> list[Range]:
    """Half-open ranges, one a dim; missing slices are full."""
    assert len(slices) <= len(shape), (shape, slices)
    assert all(part.step in (None, 1) for part in slices), slices
    full = (*slices, *(slice(None) for _ in shape[len(slices) :]))
    return [part.indices(extent)[:2] for part, extent in zip(full, shape, strict=True)]
