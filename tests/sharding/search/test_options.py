"""How an op may be divided, from its access maps; and that equal placements are equal maps."""

import pytest

from distmega.program.builder import Handle, ProgramBuilder
from distmega.program.types import Op, Tensor
from distmega.sharding.layout.domains import Device, LoopDomain
from distmega.sharding.layout.equality import shardings_differ
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import PAIR, REPLICATE, Partial, Shard
from distmega.sharding.search.options import Options, split_options
from distmega.sharding.search.signatures import OptionTable
from tests.sharding.programs import decoder
from tests.sharding.random_programs import random_program


def build(make, *inputs, num_ranks: int = 2) -> tuple[Op, Options]:
    """The last op that `make(builder, *handles)` adds, and its options."""
    p = ProgramBuilder("p")
    handles = [p.input(f"x{i}", shape, dtype) for i, (shape, dtype) in enumerate(inputs)]
    out = make(p, *handles)
    program = p.build(*([out] if isinstance(out, Handle) else handles))
    op = program.ops[-1]
    return op, split_options(op, program.tensor_map(), num_ranks)


def axes(options: Options) -> list[str]:
    return [option.axis for option in options.options]


def why(options: Options) -> dict[str, str]:
    return dict(options.rejected)


def test_a_linear_divides_rows_columns_and_sums():
    _, options = build(lambda p, x, w: p.linear(x, w), ((4, 8), "f32"), ((6, 8), "f32"))
    assert axes(options) == ["", "m0", "n", "k"]
    rows, columns, sums = (options.by_axis(a) for a in ("m0", "n", "k"))
    assert (rows.reads, rows.writes) == ((Shard(0, 2), REPLICATE), (Shard(0, 2),))
    assert (columns.reads, columns.writes) == ((REPLICATE, Shard(0, 3)), (Shard(1, 3),))
    assert (sums.reads, sums.writes) == ((Shard(1, 4), Shard(1, 4)), (Partial("sum"),))


def test_a_bias_is_added_once_where_the_sum_is_divided():
    inputs = ((4, 8), "f32"), ((6, 8), "f32"), ((6,), "f32")
    _, options = build(lambda p, x, w, b: p.linear(x, w, b), *inputs)
    assert options.by_axis("k").reads[2] == Partial("sum")
    assert options.by_axis("n").reads[2] == Shard(0, 3)
    assert options.by_axis("m0").reads[2] == REPLICATE


def test_a_tensor_read_twice_must_be_read_alike():
    _, options = build(lambda p, x, w: p.rms_norm(x, w, 1e-5), ((4, 8), "f32"), ((8,), "f32"))
    assert axes(options) == ["", "m0"]
    assert why(options)["d"] == "operand 1 is read twice, divided and otherwise"
    assert why(options)["r"] == "the op needs all of it at once"


@pytest.mark.parametrize(
    ("make", "shape", "left", "axis", "reason"),
    [
        (lambda p, x: p.slice(x, 0, 0, 4), (8, 6), ["", "i1"], "i0", "covers only part"),
        (lambda p, x: p.slice(x, 0, 0, 8, 2), (8, 6), ["", "i1"], "i0", "stride or an offset"),
        (lambda p, x: p.slice(x, 0, 2, 8), (8, 6), ["", "i1"], "i0", "stride or an offset"),
        (lambda p, x: p.concat([x, x], 0), (8, 6), ["", "i1"], "i0", "covers only part"),
        (lambda p, x: p.reshape(x, (48,)), (8, 6), ["", "i0"], "i1", "inner part of dim 0"),
        (lambda p, x: p.reduce(x, 0, "max"), (7, 6), ["", "i1"], "i0", "a max over padding"),
        (lambda p, x: p.set(x), (1, 6), ["", "i1"], "i0", "1 over 2 ranks"),
    ],
)
def test_axes_that_can_not_be_divided_say_why(make, shape, left, axis, reason):
    _, options = build(make, (shape, "f32"))
    assert axes(options) == left
    assert reason in why(options)[axis]


def test_a_dim_of_several_axes_is_divided_by_the_outermost_in_whole_steps():
    _, options = build(lambda p, x: p.reshape(x, (3 * 5,)), ((3, 5), "f32"))
    option = options.by_axis("i0")
    assert option.uneven
    assert (option.reads, option.writes) == ((Shard(0, 2),), (Shard(0, 10),))


def test_an_argmax_gives_a_pair_and_an_embedding_parts_of_a_sum():
    _, options = build(lambda p, x: p.argmax(x), ((4, 9), "f32"))
    assert options.by_axis("v").writes == (PAIR, PAIR)
    _, options = build(lambda p, i, t: p.embedding(i, t), ((4,), "i64"), ((9, 6), "f32"))
    assert options.by_axis("v").reads == (REPLICATE, Shard(0, 5))
    assert options.by_axis("v").writes == (Partial("sum"),)
    assert options.index_reads == (0,)


def test_attention_divides_heads_groups_rows_and_values():
    program = decoder(rows=4, heads=3, group=3, head=4)
    tensors = program.tensor_map()
    op = next(op for op in program.ops if op.kind == "attention")
    for num_ranks, left in ((2, "mhge"), (3, "mhge"), (4, "mhge"), (5, "hg"), (6, "")):
        options = split_options(op, tensors, num_ranks)
        assert set(axes(options)) >= set(left)
        assert not set(axes(options)) & {"d", "t"}
        assert (options.by_axis("h") is None) == (num_ranks == 6)
    groups = split_options(op, tensors, 2).by_axis("g")
    assert groups.reads == (Shard(2, 2), *(REPLICATE,) * 3)


def test_positions_known_at_run_time_are_not_divided():
    program = decoder(rows=4)
    op = next(op for op in program.ops if op.kind == "kv_append")
    options = split_options(op, program.tensor_map(), 2)
    assert axes(options) == ["", "h", "d"]
    assert why(options)["t"] == "its positions are known only at run time"


def test_equal_placements_are_equal_index_maps():
    """The planner compares placements; exact positions of the loops must give the same answer."""
    mesh, compared = DeviceMesh(tp=3), 0
    for seed in range(40):
        program = random_program(seed)
        table, tensors = OptionTable.of(program), program.tensor_map()
        made: dict[str, list] = {}
        for op in program.ops:
            roots = [(axis.name, axis.extent) for axis in op.axes]
            for option in table.options(op, 3).options:
                loop = LoopDomain.of(roots)
                loop = loop.shard(option.axis, "tp", 3) if option.axis else loop
                for access, need in zip(op.reads, option.reads, strict=True):
                    for side, gave in made.get(access.tensor, []):
                        compared += is_compared(
                            tensors[access.tensor], side, gave, (loop, access.dims), need, mesh
                        )
                for access, gave in zip(op.writes, option.writes, strict=True):
                    made.setdefault(access.tensor, []).append(((loop, access.dims), gave))
    assert compared > 200


def is_compared(tensor: Tensor, made, gave, used, need, mesh: DeviceMesh) -> bool:
    """Compares two sides where both placements speak of positions of the whole tensor."""
    partial = isinstance(gave, Partial) or isinstance(need, Partial)
    parts = any(
        index.axes and (index.offset or index.stride > 1 or span(side[0], index) != extent)
        for side in (made, used)
        for index, extent in zip(side[1], tensor.shape, strict=True)
    )
    if partial or parts or any(not index.axes for side in (made, used) for index in side[1]):
        return False
    assert shardings_differ(tensor.shape, made, used, Device("tp"), mesh) == (gave != need)
    return True


def span(loop: LoopDomain, index) -> int:
    sizes, total = dict(loop.roots), 1
    for name in index.axes:
        total *= sizes[name]
    return total
