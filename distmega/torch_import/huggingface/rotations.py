"""Rotary frequencies of classes that choose them anew in each call, by the length of its text.

In: a model and the positions of a context. Out: the same model, whose rotary embeddings have the
frequencies of a text that fills this context, however short it is: keys in caches are rotated as
those that come later. Used by decoders.py.
"""

from typing import Any

from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

LONGROPE, DYNAMIC = "longrope", "dynamic"
_FIXED = {LONGROPE: "fixed longrope", DYNAMIC: "default"}
"""What they are called once they are fixed, so that transformers leaves them as they are. Dynamic
ones change only for texts longer than max_position_embeddings, which no context is.
"""


def fix_frequencies(model: nn.Module, max_context: int) -> None:
    """Chooses the frequencies of each rotary embedding for texts of up to max_context tokens."""
    module: Any
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            module.rope_type = _FIXED.get(kinds, kinds)
            _fix(module, module.rope_type, max_context)
        elif isinstance(kinds, dict):  # one for each type of layer
            module.rope_type = {layer: _FIXED.get(kind, kind) for layer, kind in kinds.items()}
            for layer, kind in module.rope_type.items():
                _fix(module, kind, max_context, layer)


def _fix(module: Any, kind: object, max_context: int, layer: str = "") -> None:
    """New memory for the frequencies: programs of other contexts may hold the old one."""
    if kind != _FIXED[LONGROPE]:
        return
    name, options = (f"{layer}_inv_freq", {"layer_type": layer}) if layer else ("inv_freq", {})
    old: Tensor = module.get_buffer(name)
    choose = ROPE_INIT_FUNCTIONS[LONGROPE]
    new, _ = choose(module.config, old.device, seq_len=max_context, **options)
    setattr(module, name, new)


def scaling_kinds(model: nn.Module) -> tuple[str, ...]:
    """The names of rope scalings in a model's configuration, but for the default."""
    config = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if config is not None else None
    rope = getattr(text, "rope_parameters", None) or {}
    each = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    kinds = (str(part["rope_type"]) for part in each if "rope_type" in part)
    return tuple(dict.fromkeys(kind for kind in kinds if kind != "default"))
