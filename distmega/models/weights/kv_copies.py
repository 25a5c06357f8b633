"""Models with more kv heads than they have, for more ranks than these: each kv head is copied, and
its query heads are shared out among the copies.

Comes in: a ModelConfig, and how many copies. Goes out: that of a model with the same results.
Engines choose how many (decode_planner.py). Next: copied_source.py, which reads its weights.
"""

from dataclasses import replace

from distmega.models.config import ModelConfig
from distmega.models.decoder import AnyDecoder


def most_copies(config: AnyDecoder) -> int:
    """As many as a kv head can have: one for each of its query heads; 1 where a norm spans heads,
    for which copies would count too, and for a decoder that others build.
    """
    if not isinstance(config, ModelConfig):
        return 1
    return 1 if config.qk_norm_whole else config.group


def copy_kv_heads(config: AnyDecoder, copies: int) -> AnyDecoder:
    """The configuration with `copies` of each kv head, 1 to most_copies."""
    if not isinstance(config, ModelConfig):
        return config
    assert 1 <= copies <= most_copies(config), (copies, config)
    group = -(-config.group // copies)
    num_kv_heads = config.num_kv_heads * copies
    return replace(config, num_kv_heads=num_kv_heads, num_heads=num_kv_heads * group)
