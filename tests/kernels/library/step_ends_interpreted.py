"""Runs the kernel that ends a step under Triton's interpreter, in a process of its own: the
interpreter is chosen before Triton is imported. Prints how many tensors are not torch's.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from distmega.kernels.library.step_ends import end_step


def num_wrong(batch: int, most: int, steps: int) -> int:
    """Steps, of which `most` are kept; half of the positions stay."""
    torch.manual_seed(batch)
    tokens, positions = torch.randint(100, (2, batch))
    counted = torch.arange(batch) % 2
    kept, number = torch.full((most, batch), -1), torch.zeros(1, dtype=torch.int64)
    chosen = torch.randint(1000, (steps, batch))
    last = positions + steps * counted
    for found in chosen:
        end_step(found, tokens, positions, counted, kept, number)
    expected = torch.full((most, batch), -1)
    expected[: min(steps, most)] = chosen[:most]
    made = (
        (tokens, chosen[-1]),
        (positions, last),
        (kept, expected),
        (number, torch.tensor([steps])),
    )
    return sum(not torch.equal(one, other) for one, other in made)


if __name__ == "__main__":
    print(sum(num_wrong(batch, 4, steps) for batch in (1, 20, 64) for steps in (1, 4, 6)))
