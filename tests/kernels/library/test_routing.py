"""Rows sent to experts: results under Triton's interpreter, machine code for sm_90a, and which ops
and tensors the kernels are given.
"""

import pytest
import torch
from torch import Tensor

from distmega.kernels.library import device_ops, late, routing
from distmega.kernels.library.device_ops import KernelOps
from distmega.kernels.library.routing import (
    BLOCKS,
    COMPARED,
    COPIED_BYTES,
    COPIED_ROWS,
    LEAST_BINS,
    MOST_ALONE,
    MOST_PAIRS,
    WARP_COLUMNS,
    WARPS,
    block_of,
    choose_columns,
    compile_gather,
    copy_rows,
    count_pairs,
    height_of,
    rows_of,
    sort_pairs,
    takes_ids,
    takes_rows,
    takes_scores,
)
from distmega.program.builder import ProgramBuilder
from distmega.program.ops.experts import GroupRange, route_values, top_k_values
from tests.forked import run_module
from tests.kernels.sm90 import REGISTERS, Machine, compile_kernel


def test_interpreted_routing_is_torchs() -> None:
    done = run_module("tests.kernels.library.routing_interpreted")
    assert done.returncode == 0, done.stderr
    assert not done.stdout, done.stdout


@pytest.mark.parametrize("weighing", ["values", "softmax", "softmax_chosen"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("columns", "num", "choices"), [(128, 8, 8), (8, 2, 2), (512, 10, 16)])
def test_columns_are_chosen_in_registers(
    dtype: str, columns: int, num: int, choices: int, weighing: str
) -> None:
    types = {"x": f"*{dtype}", "weights": "*fp32", "chosen": "*i32"}
    types |= {"num_rows": "i32", "row_stride": "i32"}
    constants: dict[str, object] = {"extent": columns, "num": num, "weighing": weighing}
    rows, warps = rows_of(columns)
    constants |= {"columns": columns, "choices": choices, "rows": rows}
    code = compile_kernel(choose_columns, types, constants, warps, None, ("row_stride",))
    assert code.stack_bytes == 0
    if columns >= WARP_COLUMNS:  # a warp has a row: none waits for others while it chooses
        assert code.ptx.count("bar.sync") < num


def sorting(kind: str, block: int, groups: int, alone: bool) -> list[Machine]:
    """Both kernels that sort pairs, or the one that is alone."""
    bins = max(LEAST_BINS, groups)
    numbers = {"ids": f"*{kind}", "num_rows": "*i32", "num_pairs": "i32"}
    constants: dict[str, object] = {"num_choices": 8, "num_groups": groups, "block": block}
    constants["bins"] = bins
    results = dict.fromkeys(("counts", "offsets", "order", "slots"), "*i32") | {"num_parts": "i32"}
    parts = {} if alone else {"parts": "*i32"}
    sizes = {"compared": COMPARED, "height": height_of(block, bins)}
    warps = block // 32
    last = compile_kernel(sort_pairs, numbers | results | parts, constants | sizes, warps, None)
    if alone:
        return [last]
    return [compile_kernel(count_pairs, numbers | parts, constants, warps, None), last]


@pytest.mark.parametrize(
    ("kind", "block", "groups", "alone"),
    [
        ("i32", 64, 128, True),
        ("i32", MOST_ALONE, 128, True),
        ("i32", MOST_ALONE, 8, True),
        ("i32", 256, 128, False),
        ("i64", 512, 512, False),
        ("i32", 1024, 8, False),
        ("i32", 1024, 512, False),
    ],
)
def test_pairs_are_sorted_without_spills(kind: str, block: int, groups: int, alone: bool) -> None:
    for code in sorting(kind, block, groups, alone):
        assert code.stack_bytes == 0
        assert code.registers * block <= REGISTERS
        assert not {"atom.global", "red.global"} & {word[:10] for word in code.ptx.split()}


@pytest.mark.parametrize(("dtype", "size"), [("bf16", 2), ("fp32", 4)])
def test_rows_are_copied_in_wide_words(dtype: str, size: int) -> None:
    types = {"x": f"*{dtype}", "order": "*i32", "out": f"*{dtype}"}
    types |= dict.fromkeys(("num_pairs", "num_rows", "n"), "i32")
    constants = {"num_choices": 8, "rows": COPIED_ROWS, "columns": COPIED_BYTES // size}
    code = compile_kernel(copy_rows, types, constants, WARPS, None, ("n",))
    assert code.stack_bytes == 0
    assert code.ptx.count("ld.global.v4.b32") == COPIED_ROWS
    assert code.ptx.count("st.global.v4.b32") == COPIED_ROWS


@pytest.mark.parametrize(
    ("num_pairs", "block"),
    [(1, 64), (65, 128), (512, 512), (513, 256), (16384, 256), (16385, 512), (MOST_PAIRS, 1024)],
)
def test_few_pairs_are_one_block(num_pairs: int, block: int) -> None:
    assert block_of(num_pairs) == block
    assert (num_pairs <= block) == (num_pairs <= MOST_ALONE)
    assert set(BLOCKS.values()) <= {1 << n for n in range(11)}


def test_tensors_of_gpus_alone_are_taken_where_the_kernels_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.empty(5, 128, device="meta")
    ids = torch.empty(5, 8, dtype=torch.int32, device="meta")
    order = torch.empty(40, dtype=torch.int32, device="meta")

    def taken() -> list[bool]:
        fits = takes_ids(ids, 128, None), takes_ids(ids, 128, ids[0, :1].long())
        return [takes_scores(x, 8), *fits, takes_rows(x, order)]

    assert not any(taken())
    monkeypatch.setattr(routing, "has_tiles", lambda device: True)
    assert all(taken())
    many = x.repeat(1, 5)
    scores = ((x, 17), (x.double(), 8), (many, 8), (x.t(), 5), (x[:0], 8))
    assert not any(takes_scores(each, num) for each, num in scores)
    numbers = ((ids, 513), (ids.short(), 128), (ids[:0], 128), (ids.repeat(1 << 14, 1), 128))
    assert not any(takes_ids(each, num, None) for each, num in numbers)
    assert not takes_ids(ids, 128, x[0, :1])
    rows = ((x.t(), order), (x, order[::2]), (x.double(), order), (x, order.short()))
    assert not any(takes_rows(each, other) for each, other in rows)


def test_experts_rows_are_chosen_sorted_and_copied_by_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a device with tiles; of others by torch, whatever the tensors."""
    calls: list[str] = []

    def choose(x: Tensor, num: int, weighing: str) -> tuple[Tensor, ...]:
        calls.append(f"choose {num} {weighing}")
        return top_k_values(x, num, weighing)

    def sort_by_group(ids: Tensor, num_groups: int, num_rows: Tensor | None) -> tuple[Tensor, ...]:
        calls.append(f"sort {num_groups} {num_rows is not None}")
        return route_values(ids, num_groups, num_rows)

    def gather(x: Tensor, order: Tensor, num_choices: int) -> Tensor:
        calls.append(f"gather {num_choices}")
        return x[order.long() // num_choices]

    for function in (choose, sort_by_group, gather):
        monkeypatch.setattr(routing, function.__name__, function)
    monkeypatch.setattr(routing, "has_tiles", lambda device: True)
    assert late is device_ops.late
    b = ProgramBuilder("experts")
    x, scores = b.input("x", (6, 16)), b.input("scores", (6, 4))
    weights, chosen = b.top_k(scores, 2)
    routing_of = b.route(chosen, 4, b.input("used", (1,), dtype="i32"))
    ops = b.build(b.gather_rows(x, routing_of), weights).ops
    given = {"x": torch.randn(6, 16), "scores": torch.randn(6, 4)}
    given["used"] = torch.tensor([5], dtype=torch.int32)
    found = []
    for has_tiles in (True, False):
        kernels, tensors = KernelOps(), dict(given)
        monkeypatch.setattr(kernels, "_has_tiles", has_tiles)
        for op in ops:
            results = kernels.compile(op, {})([tensors[read.tensor] for read in op.reads])
            tensors |= zip((write.tensor for write in op.writes), results, strict=True)
        found.append(tensors)
        assert calls == ["choose 2 softmax", "sort 4 True", "gather 2"]
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize(
    ("base", "stop", "rows", "expected"), [(0, 4, 6, True), (3, 4, 6, False), (0, 2, 6, False),
                                           (0, 4, 3, False)]
)  # fmt: skip
def test_a_rank_with_a_part_of_rows_or_groups_leaves_them_to_torch(
    monkeypatch: pytest.MonkeyPatch, base: int, stop: int, rows: int, expected: bool
) -> None:
    b = ProgramBuilder("rows")
    routed = b.route(b.input("ids", (6, 2), dtype="i32"), 4)
    _, op = b.build(b.gather_rows(b.input("x", (6, 16)), routed)).ops
    monkeypatch.setattr(routing, "local_base", lambda *_: base)
    monkeypatch.setattr(routing, "group_range", lambda *_: GroupRange(first=0, stop=stop, num=4))
    monkeypatch.setattr(routing, "takes_rows", lambda *_: True)
    monkeypatch.setattr(routing, "gather", lambda *_: "by the kernel")
    run = compile_gather(op, {}, lambda _: ())
    assert bool(run([torch.empty(rows, 16), torch.empty(12), torch.empty(5)])) is expected
