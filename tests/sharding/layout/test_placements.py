"""Layouts as values, users' words, allocations and who loads what."""

import pytest
import torch

from distmega.errors import PlanError, VerifyError
from distmega.program.types import Program, Tensor
from distmega.sharding.finalize import verify_allocations
from distmega.sharding.layout.allocation import AllocationDomain
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import (
    REPLICATED,
    Layout,
    Partial,
    Shard,
    fits,
    local_shape,
    replicate,
    resolve_layout,
    shard,
    stream,
)

MESH = DeviceMesh(dp=2, tp=4)
TENSOR = Tensor(name="w", shape=(9, 64), dtype="f32")


@pytest.mark.parametrize(
    ("make", "found", "expected"),
    [
        (lambda: shard(0.5, "tp"), "shard(0.5, 'tp')", "whole numbers"),
        (lambda: shard(True, "tp"), "shard(True, 'tp')", "whole numbers"),
        (lambda: shard(0, 1), "shard(0, 1)", "the name of a mesh axis"),
        (lambda: shard(0, "tp") | "dp", "layout [tp=S0] joined with 'dp'", "another layout"),
        (
            lambda: shard(0, "tp") | shard(1, "tp"),
            "layout [tp=S0] joined with [tp=S1]",
            "each mesh axis on one dim, and chunks of one dim",
        ),
        (
            lambda: stream(0, 2) | stream(1, 2),
            "layout [stream=C0:2] joined with [stream=C1:2]",
            "each mesh axis on one dim, and chunks of one dim",
        ),
        (lambda: stream("0", 2), "stream('0', 2, ring='')", "whole numbers"),
        (lambda: stream(0, 2.0), "stream(0, 2.0, ring='')", "whole numbers"),
        (lambda: stream(0, 2, ring=None), "stream(0, 2, ring=None)", "the name of a mesh axis"),
    ],
)
def test_users_words_take_numbers_and_names(make, found, expected):
    with pytest.raises(PlanError) as caught:
        make()
    assert (caught.value.found, caught.value.expected) == (found, expected)


def test_users_words_join():
    layout = shard(0, "dp") | shard(1, "tp")
    assert layout.at("tp") == Shard(1) and layout.at("other") == replicate().at("tp")  # noqa: PT018
    assert layout.moved("dp", replicate().at("dp")) == shard(1, "tp")
    assert shard(0, "tp") | replicate() == shard(0, "tp")
    assert shard(0, "tp") | stream(1, 2) | shard(0, "tp") == stream(1, 2) | shard(0, "tp")
    assert layout.shards_of(1) == (("tp", Shard(1)),)


@pytest.mark.parametrize(
    "layout",
    [
        REPLICATED,
        shard(0, "tp"),
        Layout.of({"tp": Shard(1, 16), "dp": Partial("sum")}),
        Layout.of({"dp": Partial("argmax")}),
        shard(-1, "tp"),
        stream(1, 4),
        stream(-2, 2, ring="tp") | shard(0, "dp"),
        stream(1, 4) | replicate(),
    ],
)
def test_layouts_print_and_parse(layout):
    assert Layout.parse(str(layout)) == layout


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("tp=S0 tp=S1", "'tp=S1'"),
        ("stream=C0:2 stream=C1:2", "'stream=C1:2'"),
        ("tp=Q", "'tp=Q'"),
        ("tp=S0:", "'tp=S0:'"),
        (3, "'3'"),
    ],
)
def test_other_text_is_no_layout(text, word):
    with pytest.raises(PlanError) as caught:
        Layout.parse(text)
    assert word in caught.value.found


def test_resolving_fills_in_what_a_rank_holds():
    layout = resolve_layout(TENSOR, shard(0, "tp") | shard(-1, "dp"), MESH)
    assert layout == Layout.of({"tp": Shard(0, 3), "dp": Shard(1, 32)})
    assert local_shape(TENSOR.shape, layout) == (3, 32)
    assert resolve_layout(TENSOR, layout, MESH) == layout
    assert resolve_layout(TENSOR, shard(0, "one"), DeviceMesh(one=1)) == REPLICATED


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (shard(2, "tp"), "a dim below 2"),
        (shard(0, "pp"), "mesh axes of mesh(dp=2, tp=4)"),
        (Layout.of({"dp": Shard(0, 5), "tp": Shard(0, 5)}), "a chunk below 5, which the mesh axis"),
        (Layout.of({"tp": Shard(0, 2)}), "chunks that cover 9"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(layout, expected):
    with pytest.raises(PlanError) as caught:
        resolve_layout(TENSOR, layout, MESH)
    assert caught.value.expected.startswith(expected)
    assert "'w' of shape (9, 64)" in caught.value.found


def test_too_many_ranks_for_a_dim_name_the_most_that_fit():
    narrow = Tensor(name="kv", shape=(3, 64), dtype="f32")
    with pytest.raises(PlanError, match="at most 5 ranks of tp for dim 0"):
        resolve_layout(narrow, shard(0, "tp"), DeviceMesh(tp=8))


def test_less_than_half_of_a_division_is_padding():
    assert [n for n in range(1, 12) if fits(3, n)] == [1, 2, 3, 4, 5]
    assert [n for n in range(1, 12) if fits(1, n)] == [1]
    assert all(fits(64, n) for n in range(1, 65))


def test_ranges_cover_a_tensor_once_and_the_rest_is_padding():
    layout = resolve_layout(TENSOR, shard(0, "tp") | shard(1, "dp"), MESH)
    domain = AllocationDomain.of(TENSOR, layout, MESH)
    assert str(domain) == "[0:3/9@tp, 1:32/64@dp]"
    assert domain.local_shape == (3, 32)
    ranges = [domain.local_range(0, at) for at in MESH.coordinates()]
    assert ranges[:4] == [(0, 3), (3, 6), (6, 9), (9, 9)]
    assert domain.local_range(1, {"dp": 1, "tp": 0}) == (32, 64)


def test_two_mesh_axes_on_one_dim_divide_it_one_within_the_other():
    for user in (shard(0, "tp") | shard(0, "dp"), shard(-2, "dp") | shard(0, "tp")):
        layout = resolve_layout(TENSOR, user, MESH)
        assert layout == Layout.of({"dp": Shard(0, 5), "tp": Shard(0, 2)})
    assert layout.shards_of(0) == (("dp", Shard(0, 5)), ("tp", Shard(0, 2)))
    assert layout.is_innermost("tp") and not layout.is_innermost("dp")  # noqa: PT018
    domain = AllocationDomain.of(TENSOR, layout, MESH)
    assert str(domain) == "[0:2/9@dp@tp, 1:64]"
    ranges = [domain.local_range(0, at) for at in MESH.coordinates()]
    assert ranges == [(0, 2), (2, 4), (4, 5), (5, 5), (5, 7), (7, 9), (9, 9), (9, 9)]
    with pytest.raises(PlanError, match="at most 5 ranks of tp for dim 0, of which 3 are left"):
        resolve_layout(
            Tensor(name="w", shape=(6,), dtype="f32"), user.moved("dp", Shard(0)),
            DeviceMesh(dp=2, tp=8),
        )  # fmt: skip


def test_of_a_partial_weight_coordinate_0_holds_the_value():
    layout = Layout.of({"tp": Partial("sum")})
    domain = AllocationDomain.of(TENSOR, layout, MESH)
    assert str(domain) == "[0:9, 1:64] partial@tp"
    assert domain.local_range(0, {"dp": 1, "tp": 0}) == (0, 9)
    assert domain.local_range(0, {"dp": 0, "tp": 1}) == (0, 0)


@pytest.mark.parametrize("shape", [(4, 6, 2), (1, 6, 2), (4, 1, 6), (6,)])
def test_parts_have_gaps_as_strides_have(shape: tuple[int, ...]):
    whole = AllocationDomain.of(Tensor(name="x", shape=shape, dtype="f32"), REPLICATED, MESH)
    assert not whole.has_gaps
    for dim, extent in enumerate(shape):
        for part in range(1, extent + 1):
            seen = whole.sliced(dim, part)
            assert seen.local_shape == (*shape[:dim], part, *shape[dim + 1 :])
            assert seen.has_gaps != torch.empty(shape).narrow(dim, 0, part).is_contiguous()


def test_nothing_may_change_a_final_allocation():
    domain = AllocationDomain.of(TENSOR, REPLICATED, MESH)
    program = Program(name="p", tensors=(TENSOR,), ops=(), outputs=())
    assert verify_allocations(program, {"w": domain}) is program
    smaller = Program(
        name="p", tensors=(Tensor(name="w", shape=(9, 32), dtype="f32"),), ops=(), outputs=()
    )
    with pytest.raises(VerifyError, match=r"'w' of shape \(9, 32\)"):
        verify_allocations(smaller, {"w": domain})
