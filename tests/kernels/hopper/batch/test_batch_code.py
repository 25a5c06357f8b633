"""The batched decode kernel's machine code for sm_90a, compiled without a GPU."""

import re
from functools import cache

import pytest

from distmega.kernels.hopper.batch import kernel
from distmega.kernels.hopper.batch.arguments import BatchMemory, BatchSpec
from distmega.kernels.hopper.batch_plan.types import BatchFormulas
from distmega.kernels.hopper.batch_plan.words import BATCH_LOADS_AHEAD, STAGES
from distmega.kernels.hopper.plan.words import GREEDY, LIMITED, SAMPLED
from distmega.kernels.hopper.ptx.shapes import TILE_SHARED, WEIGHT_SHARED
from distmega.models.presets import PRESETS
from tests.kernels.hopper.batch_plan.test_batch_queues import queues_of
from tests.kernels.sm90 import Machine, compile_kernel

SHARED_BYTES = 227 * 1024


@cache
def compiled(head_dim: int, num_parts: int, qk_norm: bool, choice: int) -> Machine:
    tiles = f"tensordesc<bf16[16, 8, 64],{WEIGHT_SHARED.value!r}>"
    blocks = f"tensordesc<bf16[128, 64],{TILE_SHARED.value!r}>"
    types: dict[str, object] = dict.fromkeys(("weights0", "weights1", "weights2"), tiles)
    types |= {"cache_tiles": blocks, "queues": "*i32", "state": "*i32"}
    types |= dict.fromkeys(("eps", "scale"), "fp32")
    numbers = ("num_instructions", "num_steps", "batch", "num_sms", "max_context", "sample_words")
    types |= dict.fromkeys(numbers, "i32")
    words = dict.fromkeys(("ids", "events", "acts", "best_rows", "arrivals"), "*i32")
    halves = dict.fromkeys(("vectors", "embed", "cache"), "*bf16")
    kinds = dict.fromkeys(BatchMemory._fields, "*fp32") | words | halves
    types["memory"] = BatchMemory._make(kinds[name] for name in BatchMemory._fields)
    spec = BatchSpec(
        head_dim=head_dim,
        num_queries=4,
        num_heads=32,
        num_kv_heads=8 // num_parts,
        num_parts=num_parts,
        qk_norm=qk_norm,
        rotated=True,
        apart=False,
        softcap=0.0,
        attends=True,
        normalises=False,
        looks_up=True,
        epilogues=queues_of(PRESETS["llama-3.2-1b"]).epilogues,
        formulas=BatchFormulas(()),
        wide_norms=False,
        keeps_ids=False,
        choice=choice,
        sm_logits=1024,
        whole_slices=True,
        num_ranks=1,
        stages=STAGES,
        ahead=BATCH_LOADS_AHEAD,
    )
    return compile_kernel(kernel.run_batch_steps, types, {"spec": spec}, 8, None)


MACHINES = {
    "64 in two parts": (64, 2, False, GREEDY),
    "128 with norms": (128, 1, True, GREEDY),
    "drawing within limits": (128, 1, True, LIMITED),
}
BY_NIGHT = {
    "drawing": (64, 1, False, SAMPLED),
    "drawing within limits, heads of 64": (64, 2, False, LIMITED),
}


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param(x, id=name) for name, x in MACHINES.items()),
        *(pytest.param(x, id=name, marks=pytest.mark.nightly) for name, x in BY_NIGHT.items()),
    ],
)
def machine(request: pytest.FixtureRequest) -> Machine:
    return compiled(*request.param)


def test_nothing_spills(machine: Machine):
    assert machine.stack_bytes == 0


def test_registers_and_shared_memory_suffice(machine: Machine):
    assert machine.registers <= 168
    assert machine.shared_bytes <= SHARED_BYTES


def test_x_comes_as_16_bytes_a_load(machine: Machine):
    """Past the first-level cache, which may hold what the layer before left there."""
    assert len(re.findall(r"ld\.global\.cg\.v4\.b32", machine.ptx)) >= 16
    assert "ld.global.cg.b16" not in machine.ptx


def test_signals_are_releases_behind_a_barrier(machine: Machine):
    lines = [line.strip() for line in machine.ptx.splitlines()]
    kept = [line for line in lines if line and not line.startswith(("$L", "//", ".loc"))]
    releases = [
        n for n, line in enumerate(kept) if re.search(r"(atom|red)\S*\.(release|acq_rel)", line)
    ]
    assert len(releases) >= 2
    for n in releases:
        before = [line for line in kept[:n] if re.match(r"(bar\S*\.sync|@?\S* ?st\.global)", line)]
        assert before[-1].startswith("bar")
    assert "ld.acquire.gpu.global.s32" in machine.ptx
