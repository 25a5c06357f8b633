"""The decode kernel's machine code for sm_90a, compiled without a GPU by the code that launches it.

Its registers are what all branches together need, so one model of each kind is enough.
"""

import re
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from bench.llama import llama_1b
from bench.models import Model, gated_mlp
from distmega.engine.decode_planner import lower_decode, plan_decode
from distmega.engine.requests import EngineOptions
from distmega.kernels.hopper.one_row.runner import RowRunner
from distmega.kernels.hopper.plan.types import num_stages, padded_tiles_k
from distmega.kernels.hopper.plan.weight_order import order_weights
from distmega.kernels.hopper.plan.words import TILE_BYTES
from distmega.kernels.hopper.row_plan.queues import build_queues
from distmega.kernels.machines import H200
from distmega.kernels.runtime.arena import Space, layout_arena
from distmega.kernels.tasks.mode import Mode
from distmega.models.presets import PRESETS
from distmega.models.sampling import GREEDY, Method
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.localize import localize
from distmega.sharding.planner import plan_program
from tests.kernels.hopper.emulator.one_row.test_gathers import build, columns_of
from tests.kernels.hopper.row_plan.test_deferred import branches, normed_sums
from tests.kernels.offline import NUM_SMS, offline
from tests.kernels.ptx import WAIT, bare_signals, loads, plain_spins, unfenced_loads
from tests.kernels.sass import parted_at_barriers
from tests.kernels.sm90 import REGISTERS, SHARED_BYTES, Machine

MODELS = (
    ("llama-3.2-1b", 1, False),
    pytest.param("qwen3-0.6b", 1, False, marks=pytest.mark.nightly),  # samples below
    ("smollm2-135m", 1, True),
    ("llama-3.2-1b", 2, False),
    ("qwen3-8b", 4, False),
)
"""Heads of 64; of 128, with q and k norms; traced; one of several ranks."""
SPILLED_BYTES = 32
"""With several ranks and q and k norms: scalars that a task reads back once."""
LOADER_WARPS, LOADER_REGISTERS = 1, 40


@dataclass(frozen=True, slots=True)
class LoneTeam:
    """The first of `size` ranks that share nothing: what is compiled does not run."""

    size: int
    team_rank: int = 0

    def open(self, num_bytes: int) -> SimpleNamespace:
        words = torch.zeros(num_bytes // 8, dtype=torch.int64)
        return SimpleNamespace(tensor=lambda team_rank, shape, dtype: words)


NUM_LAYERS = 3
"""The kernel is told how many there are as it is launched: its code is that of the whole preset."""


def open_runner(
    name: str, num_ranks: int, method: Method = GREEDY, mode: Mode = "overlap"
) -> RowRunner:
    """Of the first layers of a preset, to be used within `offline`."""
    config = replace(PRESETS[name], num_layers=NUM_LAYERS)
    options, mesh = EngineOptions(max_context=256), DeviceMesh(tp=num_ranks)
    plan = plan_decode(config, mesh, H200, options, "none", method=method)
    lowered = lower_decode(config, plan, options, peer_memory=True, method=method)
    (segment,) = lowered.host.segments
    return RowRunner(
        segment,
        build_queues(segment, lowered.weights, lowered.states, NUM_SMS, mode=mode),
        weights=lowered.weights,
        weights_arena=torch.empty(lowered.weights.num_bytes, dtype=torch.uint8),
        state_arena=torch.empty(lowered.states.num_bytes, dtype=torch.uint8),
        team=LoneTeam(num_ranks) if num_ranks > 1 else None,
    )


@cache
def decode_code(
    name: str, num_ranks: int, trace: bool, method: Method = GREEDY, mode: Mode = "overlap"
) -> Machine:
    with pytest.MonkeyPatch.context() as patch, offline(patch) as launched:
        runner = open_runner(name, num_ranks, method, mode)
        if trace:
            runner.trace(1)
        else:
            runner.run_steps(1)
    (machine,) = launched
    return machine


@pytest.mark.parametrize(("name", "num_ranks", "trace"), MODELS)
def test_decode_fits_an_sm(name, num_ranks, trace):
    code = decode_code(name, num_ranks, trace)
    assert code.stack_bytes <= (SPILLED_BYTES if num_ranks > 1 else 0)
    assert code.shared_bytes <= SHARED_BYTES
    assert 32 * (8 * code.registers + LOADER_WARPS * LOADER_REGISTERS) <= REGISTERS


@pytest.mark.parametrize(("name", "num_ranks", "trace"), MODELS)
def test_nothing_lies_where_x_does(name, num_ranks, trace):
    """x, the queries and the weights of positions are read and written by PTX, of which Triton does
    not know: it may use that memory for nothing else. It looks for its address there, once.
    """
    tiles_k = padded_tiles_k(1)
    first = num_stages(tiles_k) * TILE_BYTES
    ring = decode_code(name, num_ranks, trace).shared_addresses
    assert [at for at in ring if first <= at < first + 2048 * tiles_k] == [first]


@pytest.mark.parametrize(
    ("name", "num_ranks", "kind", "num_candidates", "spilled"),
    [
        ("qwen3-0.6b", 1, "plain", 0, 0),
        pytest.param("qwen3-0.6b", 1, "limited", 64, 64, marks=pytest.mark.nightly),
        pytest.param("qwen3-8b", 4, "plain", 0, 0, marks=pytest.mark.nightly),
        pytest.param("qwen3-8b", 4, "limited", 64, 96, marks=pytest.mark.nightly),
        ("llama-3.2-1b", 2, "limited", 0, 128),
    ],
)
def test_drawing_spills_little(name, num_ranks, kind, num_candidates, spilled):
    """What is kept across the search for limits, and scalars that a task or a step reads back
    once; nothing without limits. Where there are ranks, what is pushed waits for the report: sums,
    candidates, and logits, before each product and once more when all of x has come. Only sums,
    logits and candidates come from peers.
    """
    method = Method(kind=kind, num_candidates=num_candidates)
    code = decode_code(name, num_ranks, False, method)
    assert code.stack_bytes <= spilled
    assert code.shared_bytes <= SHARED_BYTES
    asked = {"plain": 2, "limited": 3}[kind]
    assert code.ptx.count("ld.volatile.global") == (asked if num_ranks > 1 else 0)
    assert ("ld.relaxed.sys" in code.ptx) == (num_ranks > 1)
    assert plain_spins(code.ptx) == []
    assert parted_at_barriers(code.cubin) == []


VARIANTS = (
    ("layernorm", 1, 24), ("heads96", 2, 0),
    *(pytest.param(name, tp, 0, marks=pytest.mark.nightly)
      for name, tp in (("gelu", 1), ("gelu", 2), ("layernorm", 2), ("parallel", 1),
                       ("parallel", 2), ("postnorm", 1), ("postnorm", 2), ("heads96", 1))),
)  # fmt: skip
"""Of bench.models and bench.llama; ranks, bytes spilled at most."""


def code_of(model, num_ranks):
    """Of a program that ranks share, and its queues."""
    plan = plan_program(model.program, DeviceMesh(tp=num_ranks), H200, model.marks)
    segment = localize(plan).program
    layouts = [
        layout_arena(Space.WEIGHT, order_weights(segment)),
        layout_arena(Space.STATE, segment.with_role("state")),
    ]
    arenas = [torch.empty(layout.num_bytes, dtype=torch.uint8) for layout in layouts]
    queues = build_queues(segment, *layouts, NUM_SMS)
    with pytest.MonkeyPatch.context() as patch, offline(patch) as launched:
        RowRunner(
            segment,
            queues,
            weights=layouts[0],
            weights_arena=arenas[0],
            state_arena=arenas[1],
            team=LoneTeam(num_ranks) if num_ranks > 1 else None,
        ).run_steps(1)
    (code,) = launched
    return code, queues


@pytest.mark.nightly
@pytest.mark.parametrize("num_layers", [1, 3])
def test_sums_of_an_input_over_ranks_spill_nothing(num_layers):
    code, _ = code_of(gated_mlp(1, num_layers), 2)
    assert code.stack_bytes == 0
    assert plain_spins(code.ptx) == []
    assert parted_at_barriers(code.cubin) == []


@pytest.mark.nightly
@pytest.mark.parametrize("model", [normed_sums(3), branches()], ids=["norms", "layer norms"])
def test_sums_that_readers_add_up_spill_nothing(model):
    code, queues = code_of(model, 2)
    assert any(one.deferred for one in queues.epilogues)
    assert code.stack_bytes == 0
    assert plain_spins(code.ptx) == []
    assert parted_at_barriers(code.cubin) == []


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["gates", "added", "chain"])
def test_gathers_over_ranks_spill_nothing(name):
    program = build(name)
    model = Model(program=program, marks=columns_of(program), in_torch=lambda own, total: own["x"])
    code, _ = code_of(model, 2)
    assert code.stack_bytes == 0
    assert plain_spins(code.ptx) == []
    assert parted_at_barriers(code.cubin) == []


@pytest.mark.parametrize(("variant", "num_ranks", "spilled"), VARIANTS)
def test_decoders_of_other_kinds_fit_an_sm(variant, num_ranks, spilled):
    code, queues = code_of(llama_1b(variant, layers=3), num_ranks)
    assert len(queues.queues) == NUM_SMS
    assert code.stack_bytes <= spilled
    assert code.shared_bytes <= SHARED_BYTES


def test_barriers_spill_nothing():
    assert decode_code("qwen3-0.6b", 1, False, mode="op").stack_bytes == 0


@pytest.mark.parametrize(("name", "num_ranks", "trace"), MODELS)
def test_decode_loads_by_tma_and_waits_in_order(name, num_ranks, trace):
    code = decode_code(name, num_ranks, trace)
    assert loads(code.ptx) >= 3
    assert WAIT in code.ptx
    assert "ld.relaxed" in code.ptx or "ld.acquire" in code.ptx
    assert ("ld.relaxed.sys" in code.ptx) == (num_ranks > 1)
    assert plain_spins(code.ptx) == []
    assert parted_at_barriers(code.cubin) == []
    assert bare_signals(code.ptx) == []
    assert unfenced_loads(code.ptx) == []


def test_every_wait_for_a_word_is_bounded():
    """Each polling loop reads the clock that ends it; a kernel without stamps reads no other."""
    name = "llama-3.2-1b"
    ptx = decode_code(name, 1, False).ptx
    assert ptx.count("SPIN:") == ptx.count("%globaltimer") >= 4


def test_products_do_not_wait_for_the_report():
    """Before sums and the head's best are pushed it is looked at; for sums it is asked for before
    the products and compared behind.
    """
    lines = decode_code("llama-3.2-1b", 2, False).ptx.splitlines()
    asked = [at for at, line in enumerate(lines) if "ld.volatile.global" in line]
    assert len(asked) == 2
    between = []
    for first in asked:
        read = re.compile(r",.*" + re.escape(lines[first].split()[2]) + r"\b")
        used = next(at for at in range(first + 1, len(lines)) if read.search(lines[at]))
        between.append(any("mma.sync" in line for line in lines[first:used]))
    assert sorted(between) == [False, True]
