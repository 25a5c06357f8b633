"""Programs of prompts, planned on top of a decode plan, with the same weights and caches.

Comes in: a DecodePlan, a number of rows. Goes out: the host program of so many; without torch. Used
by prefill.py where no earlier process planned it.
"""

from distmega.collecting import gc_paused
from distmega.engine.decode_plan import DecodePlan
from distmega.engine.decode_planner import SEQUENCE_DIM, known_layouts, planned_of
from distmega.engine.prefill_plan import BY_ROWS, num_micro_batches
from distmega.hostir import late as host_late
from distmega.hostir.ir.nodes import HostProgram
from distmega.hostir.lower.join_products import join_products
from distmega.hostir.lower.pipeline import StagePart, link_stage
from distmega.hostir.passes.resize import resized_ops
from distmega.models.decoder import Logits, build_decoder
from distmega.sharding.layout.placements import layout_of_part
from distmega.sharding.localize import localize
from distmega.sharding.overlap.pairs import BY_LIBRARY
from distmega.sharding.planner import plan_program
from distmega.sharding.stages import split_stages


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
    planned = planned_of(decode_plan)
    staged = planned.staged
    layouts = staged.plan.persistent_layouts()
    if decode_plan.options.batch > 1 and not prompt:
        for cache in planned.local.program.with_role("state"):
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
