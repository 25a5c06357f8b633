"""Numbers that are none: weights, caches or logits with NaN or infinities, and where they began.

Comes in: tensors of a rank. Goes out: nothing, or a ModelError that names the first bad one: tokens
chosen from such logits mean nothing. Used by weight_loading.py,
prefill.py and engine.py.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from distmega.errors import ModelError, RequestError


class UnsoundRunError(RequestError):
    """An op has met NaN where it needs numbers, as a router does."""


def run_ops(
    run: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]], tensors: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """What an evaluator's `run` gives, op by op. UnsoundRunError for what an op refuses: those of
    models do so for numbers that are none, and for nothing else.
    """
    try:
        return run(tensors)
    except RequestError as error:
        found = error.found
        raise UnsoundRunError(found, expected=error.expected, remedy=error.remedy) from error


def is_sound(x: Tensor) -> bool:
    """Whether all numbers are finite. On a GPU the host waits for the answer."""
    if not x.is_floating_point() or not x.numel():
        return True
    least, most = torch.aminmax(x)  # NaN if one is; unlike isfinite it needs no memory
    return math.isfinite(least) and math.isfinite(most)


def require_sound_weight(name: str, x: Tensor) -> None:
    """ModelError for a weight, or a table made from the configuration, that is not all finite."""
    if not is_sound(x):
        num_bad = x.numel() - int(torch.isfinite(x).sum())
        raise ModelError(
            f"weight {name!r} with {num_bad} of {x.numel()} numbers NaN or infinite",
            expected="finite numbers",
            remedy="check the file, or the configuration that the table is made from (rope base)",
        )


def explain_unsound(
    caches: Mapping[str, Tensor], rank: int, found: str = "logits that are NaN or infinite"
) -> ModelError:
    """What to raise where logits are not finite, or an op has `found` such numbers before. caches:
    of a rank, in the order of layers; the first that is not finite tells where it began.
    """
    unsound = next((name for name, cache in caches.items() if not is_sound(cache)), "")
    where = f"first in {unsound!r}" if unsound else f"behind {[*caches][-1]!r}"
    return ModelError(
        f"{found}; on rank {rank} numbers go wrong {where}",
        expected="finite numbers in every layer",
        remedy="check the weights of that layer and of the one before it: they are finite, but too "
        "large, or do not fit the configuration",
    )
