"""Every plan computes what the whole program does: random graphs, random divisions, all ranks."""

import random
from collections import Counter

import numpy as np
import pytest

from distmega.errors import PlanError
from distmega.kernels.machines import CPU, H200
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import REPLICATED, Layout, Partial, Shard, resolve_layout
from distmega.sharding.planner import Plan, build_plan, plan_program
from distmega.sharding.resolve.resolve import InexactSplitError, Splits
from distmega.sharding.search.cost import Machine
from distmega.sharding.search.signatures import OptionTable
from tests.sharding.programs import decoder
from tests.sharding.random_programs import random_program
from tests.sharding.simulate import check_plan, random_arrays, run_whole

MESHES = (DeviceMesh(tp=2), DeviceMesh(tp=3), DeviceMesh(tp=4), DeviceMesh(dp=2, tp=2))
FREE_LINKS = Machine(
    name="free links",
    dtype="f32",
    memory_bandwidth_bytes_per_us=1.0,
    flops_per_us=(("f32", 1.0),),
    num_sms=4,
    link_bandwidth_bytes_per_us=1e9,
    collective_us=0.0,
    launch_us=0.0,
    overlap=CPU.overlap,
)
"""Collectives cost nothing, so that everything is divided that can be."""


def test_random_programs_stay_exact_and_have_what_was_planned_wrongly_before():
    num: Counter[str] = Counter()
    for seed in range(100):
        program = random_program(seed)
        found = run_whole(program, random_arrays(program, seed))
        assert all(np.abs(x).max() < 2**24 for x in found.values())
        uses = Counter(access.tensor for op in program.ops for access in op.reads)
        num.update(op.kind for op in program.ops)
        for tensor in program.tensors:
            num["scalar"] += not tensor.shape
            num["extent of 1"] += 1 in tensor.shape
            num["state"] += tensor.role == "state"
            num["tied"] += tensor.role == "weight" and uses[tensor.name] > 1
    kinds = ("linear", "concat", "view", "set", "kv_append", "embedding", "argmax", "reduce")
    assert min(num[what] for what in (*kinds, "scalar", "extent of 1", "state", "tied")) > 5


def random_division(program: Program, mesh: DeviceMesh, rng: random.Random) -> Plan:
    """A plan in which every op is divided at random, whatever it costs."""
    table, chosen = OptionTable.of(program), {}
    weights = {tensor.name for tensor in program.with_role("weight")}
    for op in program.ops:
        splits: Splits = ()
        for axis, size in mesh.axes:
            used = [option.axis for _, option in splits]
            options = [
                o
                for o in table.options(op, size).options
                if o.axis not in used
                and all(
                    not isinstance(need, Partial) or access.tensor in weights
                    for access, need in zip(op.reads, o.reads, strict=True)
                )
            ]
            option = rng.choice(options)
            splits += ((axis, option),) * bool(option.axis)
        chosen[op.name] = splits
    given = {t.name: REPLICATED for t in program.with_role("input")}
    given |= dict.fromkeys(program.outputs, REPLICATED)
    return build_plan(
        program,
        mesh,
        CPU,
        chosen,
        given,
        annotations={},
        prices_us={},
        table=table,
    )


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_any_exact_division_gives_the_whole_result(mesh):
    num_divided = num_inexact = 0
    for seed in range(60):
        program = random_program(seed, overwrite=False)
        try:
            plan = random_division(program, mesh, random.Random(seed))
        except InexactSplitError:
            num_inexact += 1
            continue
        check_plan(plan, random_arrays(program, seed))
        num_divided += sum(bool(step.splits) for step in plan.decisions)
    assert num_divided > 80
    assert num_inexact < 30


@pytest.mark.parametrize("machine", [FREE_LINKS, CPU, H200], ids=lambda m: m.name)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_planned_programs_give_the_whole_result(mesh, machine):
    for seed in range(1000, 1012):
        program = random_program(seed)
        check_plan(plan_program(program, mesh, machine), random_arrays(program, seed))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_annotated_programs_keep_every_annotation_or_are_refused(mesh):
    num_kept = num_refused = 0
    for seed in range(2000, 2024):
        program = random_program(seed)
        rng, annotations = random.Random(seed), {}
        for tensor in rng.sample(program.tensors, min(3, len(program.tensors))):
            layout = random_layout(tensor, mesh, rng)
            if layout is not None:
                annotations[tensor.name] = layout
        try:
            plan = plan_program(program, mesh, FREE_LINKS, annotations)
        except PlanError as error:
            if "in no way" not in str(error):
                raise
            num_refused += 1
            continue
        for name, layout in annotations.items():
            assert plan.layouts[name] == resolve_layout(program.tensor_map()[name], layout, mesh)
            num_kept += 1
        check_plan(plan, random_arrays(program, seed))
    assert num_kept > 12
    assert num_refused < 6


def random_layout(tensor, mesh: DeviceMesh, rng: random.Random) -> Layout | None:
    """Of one mesh axis, or of all, each on some dim or all on one."""
    if not tensor.shape:
        return None
    axes = mesh.names if rng.random() < 0.4 else (rng.choice(mesh.names),)
    dims = rng.choices(range(len(tensor.shape)), k=len(axes))
    if rng.random() < 0.5:
        dims = dims[:1] * len(axes)
    layout = Layout.of({axis: Shard(dim) for axis, dim in zip(axes, dims, strict=True)})
    try:
        resolve_layout(tensor, layout, mesh)
    except PlanError:
        return None
    return layout


@pytest.mark.parametrize("mesh", [*MESHES, DeviceMesh(tp=1), DeviceMesh(dp=3, tp=2)], ids=str)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("options", [{}, {"tied": False, "logits": False, "bias": True}])
def test_decoders_give_the_whole_result(mesh, rows, options):
    program = decoder(layers=2, rows=rows, **options)
    machine = H200 if rows > 1 else CPU
    check_plan(plan_program(program, mesh, machine), random_arrays(program, 7), exact=False)
