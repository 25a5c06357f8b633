"""Programs of prompts, planned on top of a decode plan, with the same weights and caches.

Comes in: a DecodePlan, a number of rows. Goes out: the host program of so many, and how many rows
the program of a pass should have; without torch. Used by prefill.py, which runs them.
"""

from collections.abc import Iterator
from itertools import takewhile

from distmega.collecting import gc_paused
from distmega.engine.decode_plan import SEQUENCE_DIM, DecodePlan, known_layouts
from distmega.hostir import late as host_late
from distmega.hostir.ir.nodes import HostProgram
from distmega.hostir.lower.join_products import join_products
from distmega.hostir.lower.pipeline import StagePart, link_stage
from distmega.hostir.passes.resize import resized_ops
from distmega.kernels.machines import CPU
from distmega.models.decoder import Logits, build_decoder
from distmega.sharding.layout.placements import layout_of_part
from distmega.sharding.localize import localize
from distmega.sharding.overlap.pairs import BY_LIBRARY
from distmega.sharding.planner import plan_program
from distmega.sharding.stages import split_stages

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
    several = decode_plan.staged.stage.num_stages > 1
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
    ranks = decode_plan.staged.plan.mesh.num_ranks
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


@gc_paused
def lower_prefill(decode_plan: DecodePlan, num_tokens: int, logits: Logits) -> HostProgram:
    """Host program of `num_tokens` tokens of prompts at once by library ops, on the decode plan's
    layouts and caches: see build_decoder's `prompt`. In micro-batches it takes one sequence, and
    caches are those of one, [h, t, d].
    """
    wanted = num_micro_batches(decode_plan)
    if wanted == 1:
        parts = [_prefill_part(decode_plan, num_tokens, 1, logits, prompt=True)]
        return host_late.run_passes(link_stage(parts))
    size = -(-num_tokens // wanted)
    count, rest = divmod(num_tokens, size)
    parts = [_prefill_part(decode_plan, size, count, logits)]
    if rest:
        parts.append(_prefill_part(decode_plan, rest, 1, logits))
    by_rows = ("tokens", "positions", *(["logits"] if logits == "all" else []))
    return host_late.run_passes(link_stage(parts, dict.fromkeys(by_rows, 0)))


def _prefill_part(
    decode_plan: DecodePlan, num_tokens: int, count: int, logits: Logits, *, prompt: bool = False
) -> StagePart:
    """`count` times `num_tokens` tokens, on this stage. prompt: of all sequences."""
    layouts = decode_plan.staged.plan.persistent_layouts()
    if decode_plan.options.batch > 1 and not prompt:
        for cache in decode_plan.local.program.with_role("state"):
            layouts[cache.name] = layout_of_part(layouts[cache.name], SEQUENCE_DIM)
    program = build_decoder(
        decode_plan.config,
        num_tokens,
        decode_plan.max_context,
        batch=decode_plan.options.batch if prompt else 1,
        logits=logits,
        dtype=decode_plan.machine.dtype,
        method=decode_plan.method,
        prompt=prompt,
        peaks=True,
    )
    staged = decode_plan.staged
    stage = split_stages(program, staged.cuts)[staged.stage.index]
    held = {tensor.name for tensor in stage.program.tensors}
    layouts = {name: layout for name, layout in layouts.items() if name in held}
    plan = plan_program(
        stage.program,
        staged.plan.mesh,
        decode_plan.machine,
        annotations=layouts | known_layouts(stage.program),
        overlap=BY_LIBRARY,
        spreads=False,
    )
    neighbours = decode_plan.weights.neighbours()
    local = join_products(localize(plan), neighbours, decode_plan.machine)
    by_rows = resized_ops(local.program, BY_ROWS)  # rules have sizes, programs get others
    shares = decode_plan.shares_memory
    host = staged.lower(local, megakernel=False, peer_memory=shares, kept=by_rows)
    return StagePart(stage=stage, host=host, count=count)
