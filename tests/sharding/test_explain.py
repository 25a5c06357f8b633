"""The explanation: golden text of a small plan, and deep models told once."""

import os
from pathlib import Path

from distmega.kernels.machines import CPU, H200
from distmega.program.builder import ProgramBuilder
from distmega.sharding.explain import format_bytes, format_us
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import shard, stream
from distmega.sharding.planner import plan_program
from tests.sharding.programs import decoder, mlp

GOLDEN = Path(__file__).parent / "golden" / "mlp_plan.txt"


def test_a_small_plan_in_words():
    """EXPECTTEST_ACCEPT=1 writes the file anew."""
    text = plan_program(mlp(), DeviceMesh(tp=2), CPU).explain()
    if os.environ.get("EXPECTTEST_ACCEPT") == "1":
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_equal_layers_are_told_once():
    texts = [
        plan_program(decoder(layers=n, tied=False), DeviceMesh(tp=2), CPU).explain()
        for n in (4, 20)
    ]
    assert texts[0].count("\n") == texts[1].count("\n")
    assert "layers.{0-19}.q = linear" in texts[1]
    assert "20 x" in texts[1]


def test_every_tensor_and_op_is_told_on_every_axis():
    program = decoder(layers=1)
    text = plan_program(program, DeviceMesh(dp=2, tp=2), H200).explain()
    for tensor in program.tensors:
        assert f" {tensor.name.replace('.0.', '.{0}.')}: {tensor.dtype}" in text
    for op in program.ops:
        assert f"{op.name.replace('.0.', '.{0}.')} = {op.kind}" in text
    assert text.count("    tp:") == len(program.tensors) + len(program.ops)
    assert text.count("    dp:") == len(program.tensors) + len(program.ops)


def test_annotations_and_their_conflicts_are_told():
    p = ProgramBuilder("p")
    t0, t1 = p.input("t0", (6,)), p.input("t1", (6,))
    program = p.build(p.pointwise("a0 + a1", t0, p.set(t1, name="t2"), name="t3"))
    annotations = {"t0": shard(0, "tp"), "t1": shard(0, "dp")}
    text = plan_program(program, DeviceMesh(dp=2, tp=3), CPU, annotations).explain()
    assert "fixed: t0 [tp=S0:2]" in text
    assert "fixed: t1 [dp=S0:3]" in text
    assert "t2.tp0 = take_shard over tp" in text
    assert "not i0: tp divides it" in text


def test_conflicts_say_which_annotation_won():
    p = ProgramBuilder("p")
    x, w = p.input("x", (8, 8)), p.weight("w", (8, 8))
    y = p.linear(x, w, name="y")
    program = p.build(p.concat([y, y], 0, name="z"), p.reduce(y, 1, "max", name="t"))
    text = plan_program(
        program, DeviceMesh(tp=2), CPU, {"x": shard(0, "tp"), "w": shard(0, "tp")}
    ).explain()
    assert (
        "conflicts\n  y reads w [tp=S0:4] as [tp=R]: its axis m0 is on tp, as annotated for x; "
        "w is resharded\n"
    ) in text
    marks = {"y": stream(0, 2), "z": stream(1, 2)}
    text = plan_program(program, DeviceMesh(tp=1), CPU, marks).explain()
    assert (
        "z does not run in the chunks of y: it runs in 2 chunks of i1, as annotated for z\n" in text
    )
    marks = {"y": stream(1, 2)}
    text = plan_program(program, DeviceMesh(tp=1), CPU, marks).explain()
    assert "t does not run in the chunks of y: reduce over i1 would combine" in text
    assert "conflicts" not in plan_program(program, DeviceMesh(tp=2), CPU).explain()


def test_host_loops_of_equal_layers_are_told_once():
    block = {"mid": stream(0, 2), "gate": stream(1, 2), "up": shard(0, "tp") | stream(0, 2)}
    marks = {f"layers.{i}.{name}": mark for i in range(4) for name, mark in block.items()}
    text = plan_program(decoder(layers=4, rows=4), DeviceMesh(tp=2), CPU, marks).explain()
    assert "fixed: layers.{0-3}.up [tp=S0:2]" in text
    assert "fixed: layers.{0-3}.up in 2 chunks of dim 0" in text
    assert "4 x i2 in 2: layers.{0-3}.gate(n 10 by 5), layers.{0-3}.act(i1 10 by 5)" in text
    assert "layers.{0-2}.out(i0 2 by 1), layers.{1-3}.a(m0 2 by 1)" in text
    assert "layers.{0-3}.gate by chunk: [2, 5]" in text
    assert "layers.{0-3}.act in parts with gaps: [2, 5]" in text
    assert "4 x layers.0.act does not run in the chunks of layers.0.up" in text


def test_where_chunks_end_is_told():
    """At ops that can't run in them, and at extents that give fewer."""
    p = ProgramBuilder("p")
    a = p.input("x", (9, 1)).map("a0 + 1", name="a")
    program = p.build(p.softmax(p.transpose(a, (1, 0), name="t"), name="y"))
    text = plan_program(program, DeviceMesh(tp=1), CPU, {"x": stream(0, 4)}).explain()
    assert "x comes in 3 chunks of dim 0, not in 4: 3 of 9 positions a chunk" in text
    assert "y does not run in the chunks of t: softmax" in text
    text = plan_program(program, DeviceMesh(tp=1), CPU, {"a": stream(1, 2)}).explain()
    assert "a comes in 1 chunk of dim 1, not in 2: 1 of 1 position a chunk" in text


def test_a_bias_that_comes_in_parts_is_told():
    """A sum over ranks that is needed whole, and by an op that sums over ranks as well."""
    p = ProgramBuilder("p")
    b = p.reduce(p.input("x", (6, 4)), 0, name="b")
    y = p.linear(p.input("z", (5, 8)), p.weight("w", (4, 8)), b, name="y")
    marks = {"x": shard(0, "tp")}
    plan = plan_program(p.build(y, b), DeviceMesh(tp=2), CPU, marks)
    assert [step.move.kind for step in plan.reshards].count("all_reduce") == 2
    assert "y.partial" in plan.locals
    assert "tp: k 8 -> 4, with take_shard z, all_reduce y" in plan.explain()


def test_an_axis_that_divides_nothing_is_called_idle():
    p = ProgramBuilder("p")
    program = p.build(p.set(p.input("x", (8, 8))))
    text = plan_program(program, DeviceMesh(tp=2), CPU).explain()
    assert "idle: tp=2 divides no op" in text


def test_numbers_are_short():
    assert [format_bytes(n) for n in (0, 999, 1000, 15_700_000, 2.5e9)] == [
        "0 B", "999 B", "1 kB", "15.7 MB", "2.5 GB",
    ]  # fmt: skip
    assert [format_us(t) for t in (0.1234, 12.345, 1234.5)] == ["0.123 us", "12.3 us", "1234 us"]
