"""What megakernel="auto" gives to one kernel of a GPU, and what it leaves to library ops."""

import pytest

from distmega.errors import UnsupportedError
from distmega.kernels import whole
from distmega.kernels.hopper.batch_plan.types import BatchQueues
from distmega.kernels.tasks.fuse import segment
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Program
from tests.kernels import row_programs
from tests.kernels.h200 import plan_for_h200


def test_a_row_that_no_sm_holds_is_not_the_kernels_of_one_row(monkeypatch):
    """As a row of a vocabulary's length, beside which an SM has no ring."""
    p = ProgramBuilder("long")
    x = p.rms_norm(p.input("x", (1, 131072), "bf16"), p.weight("n", (131072,), "bf16"), 1e-5)
    program = p.build(p.linear(x, p.weight("w", (64, 131072), "bf16")).map("relu(a0)"))
    assert isinstance(plan_for_h200(program, monkeypatch, forced=False).queues, BatchQueues)


@pytest.mark.parametrize("rows", [4, 16])
@pytest.mark.parametrize("num_keys", [96, 8192])
def test_rows_over_one_cache_are_one_kernel(rows, num_keys, monkeypatch):
    program = row_programs.prompt(rows, context=num_keys)
    assert plan_for_h200(program, monkeypatch, forced=False).queues


def test_more_rows_than_a_kernel_takes_are_refused_before_ops_are_fused(monkeypatch):
    """Fusing attention of 1024 rows in all ways that there are took 27 s of a start."""

    def lower_program(*args: object, **options: object) -> None:
        raise AssertionError("lowered for a kernel")

    monkeypatch.setattr(whole, "lower_program", lower_program)
    with pytest.raises(UnsupportedError, match="the persistent kernel can't do 17 rows"):
        plan_for_h200(row_programs.attending_rows(17), monkeypatch, forced=False)


def chain(rows: int, columns: int, num_products: int) -> Program:
    """Products with a formula of each element behind each."""
    p = ProgramBuilder("chain")
    x = p.input("x", (rows, columns), "bf16")
    for number in range(num_products):
        x = p.linear(x, p.weight(f"w{number}", (columns, columns), "bf16")).map("relu(a0)")
    return p.build(x)


def test_a_segment_is_fused_once(monkeypatch: pytest.MonkeyPatch):
    """Its time, the order of its weights and its kernel follow from the same fused ops."""
    segment._fused.cache_clear()
    passes: list[int] = []
    apply_rules = segment.apply_rules
    monkeypatch.setattr(
        segment, "apply_rules", lambda fusion: passes.append(0) or apply_rules(fusion)
    )
    assert plan_for_h200(chain(4, 4096, 3), monkeypatch, forced=False).queues
    assert len(passes) == 1


@pytest.mark.parametrize(
    ("rows", "columns", "num_products"), [(4, 128, 2), (16, 128, 12), (2, 1024, 2)]
)
def test_short_chains_of_several_rows_are_left_to_library_ops(
    rows: int, columns: int, num_products: int, monkeypatch
):
    """Measured on an H200, us: 12.2 by the kernel and 4.9, 35.6 and 21.0, 12.3 and 7.8."""
    program = chain(rows, columns, num_products)
    with pytest.raises(UnsupportedError, match=r"us by one kernel, as predicted.*by library ops"):
        plan_for_h200(program, monkeypatch, forced=False)
    assert plan_for_h200(program, monkeypatch, forced=True).queues


@pytest.mark.parametrize(
    ("rows", "columns", "num_products"), [(1, 128, 12), (4, 2048, 12), (16, 4096, 12)]
)
def test_rows_of_more_weights_and_single_rows_are_one_kernel(
    rows: int, columns: int, num_products: int, monkeypatch
):
    """Measured on an H200, us: 21.2 by the kernel and 39, 60.8 and 86.8, 128 and 172."""
    program = chain(rows, columns, num_products)
    assert plan_for_h200(program, monkeypatch, forced=False).queues
