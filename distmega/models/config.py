"""ModelConfig: what a decoder of the Llama family is, as one frozen value; a config.json or GGUF
metadata comes in.

huggingface/config.py and gguf/config.py read it from files, presets.py holds known ones. Nothing
here imports torch, so that `explain` works from a configuration alone. Next on the walk:
decoder.py, which turns it into a Program.
"""

import math
from dataclasses import dataclass
from typing import Literal

from distmega.errors import ModelError, UnknownModelError, counted

RopeKind = Literal["none", "linear", "llama3", "yarn", "factors"]

ARCHITECTURES = (
    "llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral", "olmoe",
)  # fmt: skip
"""The decoder families that decoder.py can build."""

MAX_LAYERS, MAX_VOCAB, MAX_EXPERTS = 1000, 2**22, 4096
MAX_EXTENT = 2**31 - 1
"""More than this is a damaged file, not a model."""
_MOST = {"num_layers": MAX_LAYERS, "vocab": MAX_VOCAB}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched for long contexts; rope.py computes them.

    `linear` divides all by factor. `llama3` divides the low ones, judged by original_max_positions
    / low_freq_factor and / high_freq_factor. `yarn` ramps between beta_fast and beta_slow and
    scales cos and sin by attention_factor. `factors` divides frequency i by factors[i] (GGUF files
    give Llama 3's scaling in this form).
    """

    kind: RopeKind = "none"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Extents and constants of a decoder. `windows`: attention window of each layer, 0 for full; ()
    when all are full. qkv_bias, out_bias, ffn_bias: the projections to queries, keys and values,
    the one after attention, and the three of the FFN have biases. qk_norm: queries and keys are
    normed, a head at a time, or with qk_norm_whole all heads of a token at once.

    num_experts: 0, or the experts of each layer but `dense_layers`, of which experts_per_token see
    a token, each of extent expert_ffn. norm_top: their weights are made to sum to one. shared_ffn:
    0, or the extent of an expert with a gate of its own that sees all tokens.

    dtype is the type the weights were published in; every reader gives float32.
    """

    architecture: str
    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int
    norm_eps: float = 1e-5
    rope_base: float = 10000.0
    rope_scaling: RopeScaling = RopeScaling()
    tied: bool = False
    windows: tuple[int, ...] = ()
    qkv_bias: bool = False
    out_bias: bool = False
    ffn_bias: bool = False
    qk_norm: bool = False
    qk_norm_whole: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    norm_top: bool = False
    shared_ffn: int = 0
    dense_layers: tuple[int, ...] = ()
    eos_ids: tuple[int, ...] = ()
    dtype: str = "f32"

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise unknown_architecture(self.architecture, "configuration")
        for name in (
            "hidden",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "ffn",
            "vocab",
            "max_positions",
        ):
            if getattr(self, name) < 1:
                raise _bad(f"{name} {getattr(self, name)}", f"{name} of at least 1")
            if getattr(self, name) > (most := _MOST.get(name, MAX_EXTENT)):
                raise _bad(f"{name} {getattr(self, name)}", f"{name} of at most {most}")
        if self.num_heads % self.num_kv_heads:
            heads = counted(self.num_heads, "query head")
            found = f"{heads} over {counted(self.num_kv_heads, 'kv head')}"
            raise _bad(found, "num_heads a multiple of num_kv_heads")
        if self.head_dim % 2:
            raise _bad(f"head_dim {self.head_dim}", "an even head_dim, for rotary pairs")
        for name in ("norm_eps", "rope_base"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise _bad(f"{name} {value}", f"a finite {name} above 0")
        if self.windows and len(self.windows) != self.num_layers:
            raise _bad(
                counted(len(self.windows), "attention window"),
                f"one for each of {counted(self.num_layers, 'layer')}",
            )
        _check_scaling(self.rope_scaling, self.head_dim, self.rope_base)
        self._check_experts()

    def _check_experts(self) -> None:
        if not self.num_experts:
            if self.experts_per_token or self.expert_ffn or self.shared_ffn:
                raise _bad("experts of which there are none", "num_experts of at least 1")
            return
        if self.num_experts > MAX_EXPERTS:
            raise _bad(counted(self.num_experts, "expert"), f"at most {MAX_EXPERTS}")
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise _bad(
                f"{counted(self.experts_per_token, 'expert')} per token of {self.num_experts}",
                "at least 1 and at most as many as there are experts",
            )
        if self.expert_ffn < 1 or self.shared_ffn < 0:
            raise _bad(
                f"expert_ffn {self.expert_ffn} and shared_ffn {self.shared_ffn}",
                "expert_ffn of at least 1, shared_ffn of at least 0",
            )
        if not {*self.dense_layers} <= {*range(self.num_layers)}:
            raise _bad(
                f"dense layers {self.dense_layers}", f"layers from 0 to {self.num_layers - 1}"
            )

    def has_experts(self, layer: int) -> bool:
        """Whether the tokens of a layer go to experts."""
        return self.num_experts > 0 and layer not in self.dense_layers

    @property
    def recurrent_states(self) -> tuple[str, ...]:
        """None: keys and values are all that these keep."""
        return ()

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.num_heads // self.num_kv_heads

    def window(self, layer: int) -> int:
        """Attention window of a layer, 0 when it sees everything before it."""
        return self.windows[layer] if self.windows else 0

    def extents(self) -> dict[str, int]:
        """Extents by the letters of weights/tensors.py: v vocab, k hidden, f ffn, h kv heads, g
        group, d head dim, a and b all query and all kv heads' dims, e experts, j ffn of each, s of
        the shared one, o one.
        """
        return {
            "v": self.vocab, "k": self.hidden, "f": self.ffn,
            "h": self.num_kv_heads, "g": self.group, "d": self.head_dim,
            "a": self.num_heads * self.head_dim, "b": self.num_kv_heads * self.head_dim,
            "e": self.num_experts, "j": self.expert_ffn, "s": self.shared_ffn, "o": 1,
        }  # fmt: skip


def _check_scaling(scaling: RopeScaling, head_dim: int, base: float) -> None:
    if not (math.isfinite(scaling.factor) and scaling.factor >= 1):
        raise _bad(f"rope scaling factor {scaling.factor}", "a finite factor of at least 1")
    if scaling.kind in ("llama3", "yarn") and scaling.original_max_positions < 1:
        found = (
            f"{scaling.kind} rope scaling of {scaling.original_max_positions} original positions"
        )
        raise _bad(found, "the number of positions the model was first trained on")
    if scaling.kind == "llama3" and not 0 < scaling.low_freq_factor < scaling.high_freq_factor:
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        found = f"low_freq_factor {low} and high_freq_factor {high}"
        raise _bad(found, "0 < low_freq_factor < high_freq_factor")
    if scaling.kind == "yarn" and not (0 < scaling.beta_slow < scaling.beta_fast and base > 1):
        found = (
            f"yarn with beta_slow {scaling.beta_slow}, beta_fast {scaling.beta_fast}, base {base}"
        )
        raise _bad(found, "0 < beta_slow < beta_fast and a base above 1")
    if scaling.kind == "yarn" and not 0 < scaling.attention_factor < math.inf:
        raise _bad(f"yarn with attention_factor {scaling.attention_factor}", "a finite one above 0")
    if scaling.kind == "factors":
        if len(scaling.factors) != head_dim // 2:
            raise _bad(
                counted(len(scaling.factors), "rope factor"),
                f"{head_dim // 2}, one a rotary pair",
            )
        if not all(math.isfinite(factor) and factor > 0 for factor in scaling.factors):
            raise _bad(
                "a rope factor that is not a finite number above 0", "finite factors above 0"
            )


def unknown_architecture(name: str, where: str) -> ModelError:
    """The error for a model family that decoder.py does not know."""
    return UnknownModelError(
        f"unknown architecture {name!r} in {where}",
        expected=f"one of {', '.join(ARCHITECTURES)}",
        remedy="use a model of one of these families",
    )


def _bad(found: str, expected: str) -> ModelError:
    return ModelError(
        f"model configuration: {found}", expected=expected, remedy="correct the configuration"
    )
