"""Collectives of torch that have another name since 2.13, which warns of the older one: each under
the newer name; nothing else looks them up. Used by communicator.py.
"""

from collections.abc import Callable
from typing import cast

import torch.distributed as dist

Started = Callable[..., dist.Work | None]

all_gather_single = cast(
    Started, getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
"""(output, input, group, async_op): the ranks' inputs, one behind the other."""

reduce_scatter_single = cast(
    Started, getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
"""(output, input, op, group, async_op): this rank's part of what the inputs make."""
