"""A host program of other extents is what lowering it for these extents gives."""

from dataclasses import replace

import pytest
import torch

from distmega.engine.decode_plan import DecodePlan
from distmega.engine.decode_planner import lower_decode, lower_library_decode, plan_decode
from distmega.engine.prefill_planner import lower_prefill
from distmega.engine.requests import EngineOptions
from distmega.errors import UnsupportedError
from distmega.hostir.ir.nodes import HostProgram, LibraryOp
from distmega.hostir.ir.text import print_host
from distmega.hostir.ir.verify import verify_host
from distmega.hostir.lower.lower import lower_program
from distmega.hostir.passes.passes import run_passes
from distmega.hostir.passes.resize import resize_inputs, resized_ops
from distmega.kernels.machines import CPU, H200
from distmega.models.presets import PRESETS
from distmega.models.sampling import GREEDY, Method
from distmega.program.kinds import FUSED_GRAPH
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import shard
from distmega.sharding.localize import localize
from distmega.sharding.planner import plan_program
from distmega.sharding.search.cost import Machine
from tests.hostir.programs import run_program
from tests.hostir.threads import run_mesh
from tests.program.experts import moe_block

BY_ROWS = ("tokens", "positions", "sequences")


def decode_plan_of(
    model: str, num_ranks: int, batch: int = 1, machine: Machine = H200, method: Method = GREEDY
) -> DecodePlan:
    config = replace(PRESETS[model], num_layers=3)
    options = EngineOptions(max_context=4096, batch=batch)
    staged = plan_decode(config, DeviceMesh(tp=num_ranks), machine, options, method=method)
    return lower_decode(config, staged, options, peer_memory=True, method=method)


def resized(host: HostProgram, size: int, name: str) -> HostProgram:
    return resize_inputs(host, dict.fromkeys(BY_ROWS, (size,)), name)


@pytest.mark.parametrize(
    ("model", "num_ranks", "batch", "sizes"),
    [
        ("qwen3-8b", 1, 1, (64, 448, 2048)),
        ("llama-3.2-1b", 1, 16, (64, 2048, 8192)),
        ("qwen3-8b", 2, 16, (4608, 6144, 8192)),
        ("qwen3-8b", 2, 1, (64, 192, 448)),
        ("qwen3-30b-a3b", 1, 4, (64, 448, 8192)),
        ("qwen3-30b-a3b", 2, 1, (64, 192, 448)),
    ],
)
def test_other_rows_give_the_text_of_a_program_lowered_for_them(
    model: str, num_ranks: int, batch: int, sizes: tuple[int, ...]
):
    decode_plan = decode_plan_of(model, num_ranks, batch, method=Method(kind="plain"))
    hosts = [lower_prefill(decode_plan, size, "none") for size in sizes]
    for host in hosts:
        for size, expected in zip(sizes, hosts, strict=True):
            found = verify_host(resized(host, size, expected.name))
            symmetric_buffers = zip(
                found.symmetric_buffers, expected.symmetric_buffers, strict=True
            )
            assert all(room.num_bytes >= least.num_bytes for room, least in symmetric_buffers)
            assert print_host(
                replace(found, symmetric_buffers=expected.symmetric_buffers)
            ) == print_host(expected)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("divided", [(0, 0), (1, 2)], ids=["whole experts", "parts of each"])
@pytest.mark.parametrize(("rows", "others"), [(9, 4), (4, 9), (6, 1)])
def test_rows_sorted_by_group_are_as_many_as_rows_ask_for(
    num_ranks: int, divided: tuple[int, int], rows: int, others: int
):
    names = {"w_gate": divided[0], "w_up": divided[0], "w_down": divided[1]}
    layouts = {name: shard(dim, "tp") for name, dim in names.items() if num_ranks > 1}
    mesh = DeviceMesh(tp=num_ranks)
    known, wanted = (
        localize(plan_program(moe_block(size), mesh, CPU, annotations=layouts))
        for size in (rows, others)
    )
    host = run_passes(lower_program(known, megakernel=False, peer_memory=False, fuse=True))
    found = verify_host(resize_inputs(host, {"x": (others, 8)}, "moe"), freed=True)
    program = moe_block(others)
    assert resized_ops(moe_block(rows), {"x"}) == {op.name for op in program.ops}
    generator = torch.Generator().manual_seed(0)
    given = [tensor for tensor in program.tensors if tensor.role != "temp"]
    tensors = {each.name: torch.randn(each.shape, generator=generator) for each in given}
    expected = run_program(program, tensors)
    for each in run_mesh(found, wanted, tensors):
        for name in program.outputs:
            torch.testing.assert_close(each[name], expected[name])


def rules_of(host: HostProgram) -> list[str]:
    ops = [node.op for node in host.body if isinstance(node, LibraryOp)]
    return [str(op.attr("rule")) for op in ops if op.kind == FUSED_GRAPH]


def test_rules_make_ops_whose_sizes_are_no_rows_of_prompts():
    """The last layer's norm and gate, the last norm and the logits, of one row; those of all rows
    are left alone.
    """
    decode_plan = decode_plan_of("llama-3.2-1b", 1)
    rules = rules_of(lower_prefill(decode_plan, 64, "none"))
    assert len(rules) == 2
    assert all(rule.startswith("rmsnorm_linear.") for rule in rules)
    assert rules_of(lower_prefill(decode_plan, 64, "all")) == []
    assert rules_of(lower_library_decode(decode_plan)) != rules
    on_cpu = decode_plan_of("llama-3.2-1b", 1, machine=CPU)
    assert rules_of(lower_prefill(on_cpu, 64, "none")) == []


def test_ops_of_rules_are_never_resized():
    host = lower_library_decode(decode_plan_of("llama-3.2-1b", 1, batch=4))
    (op, *_) = (n.op for n in host.body if isinstance(n, LibraryOp) and n.op.kind == FUSED_GRAPH)
    alone = replace(host, body=(LibraryOp(op=op),), outputs=(op.writes[0].tensor,))
    x = op.reads[0].tensor
    size = alone.buffer_map()[x].shape[0]
    buffers = tuple(replace(b, role="input") if b.name == x else b for b in alone.buffers)
    alone = replace(alone, buffers=buffers)
    assert resize_inputs(alone, {x: (size, *alone.buffer_map()[x].shape[1:])}, "same").body
    with pytest.raises(UnsupportedError, match="other sizes of rule 'gated_mlp"):
        resize_inputs(alone, {x: (7, *alone.buffer_map()[x].shape[1:])}, "more")


def test_all_logits_and_other_chunks_of_a_vocabulary():
    decode_plan = decode_plan_of("llama-3.2-1b", 4)
    host, expected = (lower_prefill(decode_plan, size, "all") for size in (2048, 2304))
    found = verify_host(resized(host, 2304, expected.name))
    assert found.buffer_map()["logits"].shape == expected.buffer_map()["logits"].shape
    assert found.outputs == expected.outputs


def test_rows_that_do_not_divide_over_ranks_are_refused():
    """On the CPU rows are as many as tokens."""
    decode_plan = decode_plan_of("qwen3-8b", 2)
    host = lower_prefill(decode_plan, 2048, "none")
    with pytest.raises(UnsupportedError, match="extents that divide as those of the program do"):
        resized(host, 2047, "odd")


def test_a_pipelines_micro_batches_are_refused():
    options = EngineOptions(max_context=256, micro_batches=2)
    config = PRESETS["tiny-llama"]
    staged = plan_decode(config, DeviceMesh(tp=1), CPU, replace(options, max_context=64))
    decode_plan = lower_decode(config, staged, replace(options, max_context=64), peer_memory=False)
    host = lower_prefill(decode_plan, 16, "none")
    with pytest.raises(UnsupportedError, match="ForLoop in a program to resize"):
        resize_inputs(host, {"tokens": (32,), "positions": (32,)}, "longer")
