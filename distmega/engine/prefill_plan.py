"""Sizes of programs of prompts.

Comes in: a DecodePlan, a number of rows. Goes out: how many rows the program of a pass should have;
without torch. Used by prefill.py, which runs them; prefill_planner.py plans them.
"""

from collections.abc import Iterator
from itertools import takewhile

from distmega.engine.decode_plan import DecodePlan
from distmega.kernels.machines import CPU

MICRO_BATCHES = 4
"""Parts in which a pipeline prefills a prompt unless asked otherwise."""

FEWEST_TOKENS = 64
"""Of a program that prefills a prompt on a GPU."""

FILLED_UP = 1.25
"""How many times its rows a pass may take so that kernels have the collectives beside them: by the
model, products of Qwen3-8B then take 0.87 to 0.98 of the time over two ranks, 0.73 to 0.96 over
four.
"""
BESIDE = 4
"""Times the least rows that such kernels take from which passes are filled up for them."""

BY_ROWS = frozenset({"tokens", "positions", "sequences"})
"""Inputs of such a program whose extents are its size."""


def num_micro_batches(decode_plan: DecodePlan) -> int:
    """Parts in which a prompt is prefilled."""
    several = decode_plan.num_stages > 1
    return decode_plan.options.micro_batches or (MICRO_BATCHES if several else 1)


def prefill_size(decode_plan: DecodePlan, num_tokens: int, most: int) -> int:
    """Rows of the program that takes num_tokens rows of prompts, where `most` is as many as their
    caches and the budget have room for.

    On GPUs programs have few sizes, each of which becomes a graph: multiples of 64 up to 1024, then
    8 to an octave. A GPU waits for the weights' bytes up to some 100 rows, and beyond 512 at most
    an eighth is filled up, or a quarter where several ranks' kernels then have their collectives
    beside them. A CPU waits for every row.
    """
    if decode_plan.machine == CPU or num_micro_batches(decode_plan) > 1:
        return num_tokens
    ranks = decode_plan.ranks.num_ranks
    if ranks > 1 and decode_plan.peer_memory:
        least = ranks * decode_plan.machine.overlap.rank_rows
        limit = min(most, int(FILLED_UP * num_tokens))
        for size in takewhile(lambda size: size <= limit, _sizes_from(num_tokens)):
            if size >= BESIDE * least and size % least == 0:
                return size
    size = next(_sizes_from(num_tokens))
    return size if size <= most else num_tokens


def _sizes_from(num_tokens: int) -> Iterator[int]:
    """Those of programs on GPUs that hold so many rows, ascending."""
    while True:
        step = max(FEWEST_TOKENS, (1 << (num_tokens - 1).bit_length()) // 16)
        size = -(-num_tokens // step) * step
        yield size
        num_tokens = size + 1
