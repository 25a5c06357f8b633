"""An op added in one file, this one: stated, planned over two ranks, run, printed."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from distmega.compiled import CompiledProgram
from distmega.errors import ProgramError
from distmega.kernels.machines import CPU
from distmega.program import kinds
from distmega.program.builder import ProgramBuilder
from distmega.program.ops.parts import Built, access, bad_op, make_op
from distmega.program.text import parse_program, print_program
from distmega.program.types import Axis, Program, Tensor
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import shard
from distmega.sharding.planner import plan_program
from tests.hostir.threads import ThreadCommunicator, Wires
from tests.repo.source import modules


def weighted(name: str, x: Tensor, ids: Tensor, table: Tensor) -> Built:
    """Rows of x [m, d] times table [v] at ids [m], and those factors: outputs [name].factor [m] and
    [name] [m, d].
    """
    if x.shape[:1] != ids.shape or len(table.shape) != 1:
        raise bad_op(name, f"x {x.shape}, ids {ids.shape}", "[m, d], [m] and a table [v]")
    axes = [Axis(name=n, extent=e) for n, e in zip("md", x.shape, strict=True)]
    axes.append(Axis(name="v", extent=table.shape[0], role="reduce", lookup=True))
    factor = Tensor(name=f"{name}.factor", shape=ids.shape, dtype=table.dtype)
    out = Tensor(name=name, shape=x.shape, dtype=x.dtype)
    reads = [access(x, "m", "d"), access(ids, "m"), access(table, "v")]
    writes = [access(factor, "m"), access(out, "m", "d")]
    return make_op(name, "weighted", axes, reads, writes), (factor, out)


def compute_weighted(
    x: torch.Tensor, ids: torch.Tensor, table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    factor = table[ids]
    return factor, x * factor.unsqueeze(1)


@pytest.fixture(autouse=True)
def _defined(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would stand in the op's file; the kind is gone after each test."""
    monkeypatch.setattr(kinds, "_KINDS", dict(kinds._KINDS))
    kinds.define(
        kinds.OpKind(
            name="weighted",
            zero_where=kinds.zero_in(0),
            flops=lambda op, work: work.sizes["m"] * work.sizes["d"],
            reference=lambda op, coordinate: compute_weighted,
        )
    )


def weighted_program() -> Program:
    p = ProgramBuilder("weighting")
    x, ids = p.input("x", (6, 4)), p.input("ids", (6,), "i64")
    weighted_rows = p.op(weighted, x, ids, p.weight("table", (5,)), name="y")
    return p.build(weighted_rows.map("a0 + 1", name="out"))


def test_two_ranks_run_it_on_rows_of_their_own():
    mesh = DeviceMesh(tp=2)
    plan = plan_program(weighted_program(), mesh, CPU, {"x": shard(0, "tp")})
    assert plan.allocations["y"].local_shape == (3, 4)
    generator = torch.Generator().manual_seed(0)
    x, table = torch.randn(6, 4, generator=generator), torch.randn(5, generator=generator)
    ids = torch.tensor([4, 0, 1, 1, 3, 2])
    wires = Wires(mesh)
    ranks = [CompiledProgram(plan, ThreadCommunicator(mesh, r, wires)) for r in range(2)]
    values = {"x": x, "ids": ids, "table": table}
    with ThreadPoolExecutor(2) as pool:
        outs = list(pool.map(lambda rank: rank(rank.parts(values))["out"], ranks))
    for out in outs:
        torch.testing.assert_close(out, x * table[ids].unsqueeze(1) + 1)


def test_it_prints_and_parses():
    program = weighted_program()
    assert "weighted[" in print_program(program)
    assert parse_program(print_program(program)) == program


def test_a_definition_that_can_not_serve_is_refused():
    with pytest.raises(ProgramError, match=r"op kind 'linear', which is defined already; .*rename"):
        kinds.define(kinds.OpKind(name="linear"))
    with pytest.raises(ProgramError, match="operator 'logcumsumexp' of torch, without build"):
        kinds.define(kinds.OpKind(name="of_torch", torch_row_op="logcumsumexp"))


@pytest.mark.parametrize("kind", ["cumprod", "cumsum", "topk"])
def test_an_op_of_the_package_stands_in_one_file_and_the_builder(kind: str):
    """No other layer knows such an op by name but the instructions of megakernels; forms of
    captured modules use what they need.
    """
    named = {
        name
        for name, path in modules().items()
        if f'"{kind}"' in path.read_text() and ".torch_import" not in name
    }
    (home,) = {name for name in named if name.startswith("distmega.program.ops.")}
    instructions = {name for name in named if name.startswith("distmega.kernels.isa.")}
    tiles = {"distmega.kernels.tasks.tile"}
    assert named - instructions <= {home, "distmega.program.builder"} | tiles
