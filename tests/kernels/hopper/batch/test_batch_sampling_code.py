"""Machine code of the batched decode kernel where ranks that share a model draw in it."""

from functools import cache

import pytest

from distmega.models.sampling import Method
from tests.kernels.hopper.batch_plan.test_batch_team import decode_plan, open_batch_runner
from tests.kernels.offline import offline
from tests.kernels.ptx import bare_signals, plain_spins
from tests.kernels.sass import parted_at_barriers, spills_in_products
from tests.kernels.sm90 import SHARED_BYTES, Machine

PLAIN, LIMITED = Method(kind="plain"), Method(kind="limited", num_candidates=64)
CASES = [("llama-3.2-1b", 2, PLAIN), ("qwen3-8b", 4, LIMITED)]
BY_NIGHT = ("llama-3.2-1b", 2, LIMITED)
"""Limits among any tokens are looked for by the same code."""
SPILLED_BYTES = 24
"""Scalars that an instruction or a draw reads back once."""
MOST_IN_PRODUCTS = {BY_NIGHT: 4}
"""Accesses to two halfwords in the loop over k, of which one turn has some 600 instructions, since
SMs have a piece of attention each (docs/notes/batch.md).
"""


@cache
def compiled(name: str, tp: int, method: Method) -> Machine:
    lowered = decode_plan(name, tp, method=method)
    with pytest.MonkeyPatch.context() as patch, offline(patch) as launched:
        open_batch_runner(lowered).run_steps(1)
    (machine,) = launched
    return machine


@pytest.fixture(
    scope="module",
    params=[*CASES, pytest.param(BY_NIGHT, marks=pytest.mark.nightly)],
    ids=lambda case: f"{case[0]} tp={case[1]} {case[2]}",
)
def case(request: pytest.FixtureRequest) -> tuple[str, int, Method]:
    found: tuple[str, int, Method] = request.param
    return found


@pytest.fixture(scope="module")
def machine(case: tuple[str, int, Method]) -> Machine:
    return compiled(*case)


def test_it_fits_an_sm(machine: Machine):
    assert machine.registers <= 168
    assert machine.shared_bytes <= SHARED_BYTES
    assert machine.stack_bytes <= SPILLED_BYTES


def test_nothing_spills_where_weights_are_multiplied(
    case: tuple[str, int, Method], machine: Machine
):
    """Which would cost a third of a step (docs/notes/batch.md)."""
    spills = spills_in_products(machine.cubin)
    assert len(spills) <= MOST_IN_PRODUCTS.get(case, 0), spills
    assert all(".S16" in spill for spill in spills)
    assert parted_at_barriers(machine.cubin) == []


def test_waits_and_signals_are_as_they_should_be(machine: Machine):
    assert plain_spins(machine.ptx) == []
    assert bare_signals(machine.ptx) == []


@pytest.mark.parametrize(
    ("name", "tp", "method"), [CASES[1], pytest.param(*BY_NIGHT, marks=pytest.mark.nightly)]
)
def test_logits_are_told_of_behind_a_barrier_and_a_fence(name: str, tp: int, method: Method):
    """Whoever polled the words passes a fence and a barrier too."""
    lines = [line.strip() for line in compiled(name, tp, method).ptx.splitlines()]
    kept = [line for line in lines if line and not line.startswith(("//", ".loc", "$L"))]
    ready_flags = [at for at, line in enumerate(kept) if "st.relaxed.sys.global.v2.b64" in line]
    assert len(ready_flags) == 1, "a rank a thread"
    fence = max(at for at, line in enumerate(kept[: ready_flags[0]]) if "fence.acq_rel.sys" in line)
    assert not any("st." in line for line in kept[fence : ready_flags[0]])
    before = [line for line in kept[:fence] if "bar.sync" in line or "st.global" in line]
    assert "bar.sync" in before[-1]
    after = kept[ready_flags[-1] :]
    polls = [at for at, line in enumerate(after) if "ld.relaxed.sys.global.v2.b64" in line]
    assert polls
    heard = next(at for at, line in enumerate(after) if line.startswith("fence.acq_rel.sys"))
    assert polls[0] < heard
    barrier = next(at for at, line in enumerate(after) if "bar.sync" in line and at > heard)
    assert not any("ld.global" in line for line in after[heard:barrier])
