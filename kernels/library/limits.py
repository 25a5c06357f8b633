"""What the kernels for groups of rows and for packed prompts take; torch does the rest.

Read where ops are planned, by types alone (device_ops.py), and where the kernels are given tensors
(routing.py, grouped_products.py, packed_attention.py), so that both answer alike.
"""

import torch

LEAST_CAPABILITY = (9, 0)
"""Of GPUs, as torch has it."""

GROUP_DTYPES = ("bf16", "f16", "f32")
"""Of scores, rows and matrices."""
GROUP_ALIGNED = 8
"""Rows of operands are multiples of so many elements: TMA takes them then, whatever their type."""

PACKED_DTYPES = ("bf16", "f16")
"""Of queries, keys and values."""
PACKED_DIM, PACKED_ALIGNED = 256, 8
"""The longest heads, and what they are multiples of."""


def has_tiles(device: torch.device) -> bool:
    """Whether the kernels run on a device."""
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY
