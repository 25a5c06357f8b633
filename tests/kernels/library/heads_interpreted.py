"""Runs the kernel of heads under Triton's interpreter, in a process of its own: the interpreter is
chosen before Triton is imported. Prints the largest error against torch; fails where rows at places
that a cache does not have change it.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

from unittest.mock import patch

import torch

from distmega.hostir.library import heads as library
from distmega.hostir.library.heads import Heads
from distmega.kernels.library import heads as kernel
from tests.kernels.interpreting import apart

ROWS, CONTEXT = 5, 11
STEPS = {
    "qk norm": ("norm rope", "norm rope append", "append"),
    "plain": ("rope", "rope append", "append"),
    "norm alone": ("norm",),
    "rope alone": ("rope",),
    "append alone": ("append",),
}


def error_of(
    steps: tuple[str, ...], dim: int, num_sequences: int, num_heads: int, own: bool = False
) -> float:
    """Parts of one tensor, as joined products have them, of 3 times as many heads for the first.
    own: row m goes to cache m.
    """
    torch.manual_seed(0)
    counts = [num_heads * (3 if number == 0 else 1) for number in range(len(steps))]
    whole = torch.randn(ROWS, sum(counts) * dim)
    positions = apart(torch.randperm(CONTEXT)[:ROWS])
    several = num_sequences > 0
    sequences = None
    if several and not own:
        sequences = apart(torch.randint(0, num_sequences, (ROWS,)))
    table = torch.randn(CONTEXT, dim)
    made, given, left = [], [], 0
    for text, count in zip(steps, counts, strict=True):
        x = whole[:, left : left + count * dim].unflatten(1, (count, dim))
        if "append" not in text and count % 3 == 0:
            x = x.unflatten(1, (count // 3, 3))
        left += count * dim
        cache = (*[num_sequences] * several, count, CONTEXT, dim)
        out = torch.zeros(cache) if "append" in text else torch.zeros(x.shape)
        weight = torch.randn(dim) if "norm" in text else None
        for outs, place in ((made, out.clone()), (given, out)):
            part = Heads(
                x=x, weight=weight, out=place, rotates="rope" in text, appends="append" in text
            )
            outs.append(part)
    angles = table if any("rope" in text for text in steps) else None
    with patch.object(library, "move_heads", side_effect=AssertionError("the kernel takes it")):
        kernel.move_heads(made, positions, angles, sequences, 1e-5)
    library.move_heads(given, positions, angles, sequences, 1e-5)
    assert all(part.out.abs().max() > 0 for part in given)
    pairs = zip(made, given, strict=True)
    return max(float((found.out - part.out).abs().max()) for found, part in pairs)


def append_elsewhere() -> None:
    """Rows behind and in front of a cache leave it as it is, and have no angles."""
    cache = torch.zeros(2, 3, CONTEXT, 8)
    positions = torch.tensor([2, -1, CONTEXT, 4, 5, 6])
    sequences = torch.tensor([0, 0, 1, -1, 2, 1])
    x, table = torch.ones(len(positions), 3, 8), torch.ones(CONTEXT, 8)
    turned = torch.zeros(x.shape)
    parts = [
        Heads(x=x, weight=None, out=turned, rotates=True, appends=False),
        Heads(x=x, weight=None, out=cache, rotates=False, appends=True),
    ]
    kernel.move_heads(parts, positions, table, sequences, 0.0)
    assert turned.isnan().all((1, 2)).tolist() == [False, True, True, False, False, False]
    assert turned.isnan().any((1, 2)).tolist() == turned.isnan().all((1, 2)).tolist()
    written = torch.zeros(cache.shape)
    written[0, :, 2] = written[1, :, 6] = 1
    assert torch.equal(cache, written)


if __name__ == "__main__":
    with (
        patch.object(kernel, "_on_gpu", lambda _: True),
        patch.object(kernel, "MOST_ELEMENTS", 64),  # several programs for the heads of a part
    ):
        errors = [
            error_of(steps, dim, num_sequences, num_heads)
            for steps in STEPS.values()
            for dim, num_sequences, num_heads in ((16, 0, 2), (24, 3, 5), (4, 2, 1))
        ] + [error_of(steps, 8, ROWS, 2, own=True) for steps in STEPS.values()]
        append_elsewhere()
    print(max(errors))
