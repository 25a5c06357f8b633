"""How one element of a row is chosen: the largest, or one sampled among the most likely.

As compute.py: names and tensors in, the Op and the tensors it writes out. The random numbers are
those of `hostir/library/sampling.py`.
"""

from distmega.program.kinds import OpKind, define, one_a_point
from distmega.program.ops.parts import (
    Built,
    access,
    axis_names,
    bad_op,
    index,
    make_op,
    require_integers,
)
from distmega.program.types import Access, Axis, Tensor


def argmax(name: str, x: Tensor) -> Built:
    """Index of the largest element of the last dim, the lowest on ties: outputs [name].value and
    [name] (i64).
    """
    if not x.shape:
        raise bad_op(name, "x without dims", "[..., v]")
    rows = axis_names("m", len(x.shape) - 1)
    axes = [Axis(name=n, extent=e) for n, e in zip(rows, x.shape[:-1], strict=True)]
    axes.append(Axis(name="v", extent=x.shape[-1], role="reduce", combine="argmax"))
    value = Tensor(name=f"{name}.value", shape=x.shape[:-1], dtype=x.dtype)
    index = Tensor(name=name, shape=x.shape[:-1], dtype="i64")
    op = make_op(
        name,
        "argmax",
        axes,
        [access(x, *rows, "v")],
        [access(value, *rows), access(index, *rows)],
    )
    return op, (value, index)


MAX_PARTS = 8
"""Parts of a row whose largest elements `top` finds apart, so that ranks can share the work."""


def top(name: str, x: Tensor, num_top: int) -> Built:
    """The num_top largest of each part of a row of x [m, v], largest first: [m, s, num_top].

    The row is s equal parts: as many as divide it, at most MAX_PARTS, with num_top elements each.
    """
    if len(x.shape) != 2 or not 1 <= num_top <= x.shape[-1]:
        found = f"the {num_top} largest of rows of {x.shape}"
        raise bad_op(name, found, "x [m, v] and at least 1, at most v of them")
    rows, extent = x.shape
    fitting = (n for n in range(1, MAX_PARTS + 1) if extent % n == 0 and extent // n >= num_top)
    num_parts = max(fitting)
    axes = [Axis(name="m", extent=rows), Axis(name="s", extent=num_parts)]
    axes.append(Axis(name="u", extent=extent // num_parts, role="reduce"))
    axes.append(Axis(name="c", extent=num_top, role="scatter"))
    out = Tensor(name=name, shape=(rows, num_parts, num_top), dtype=x.dtype)
    read = Access(tensor=x.name, dims=(index("m"), index("s", "u")))
    return make_op(name, "top", axes, [read], [access(out, "m", "s", "c")]), (out,)


def cutoff(name: str, x: Tensor, settings: Tensor) -> Built:
    """What may be sampled: limits [m, 2] f32, the temperature and the least logit, of rows of x
    [m, ...].

    settings [m, 3] f32: temperature, top_k (0: all), top_p. Of x over temperature, the top_k
    largest, and of these the largest that together make up top_p of their probability; what equals
    the last of either is kept with it. x holds all logits, or at least the top_k largest.
    """
    rows = x.shape[0] if x.shape else 0
    if len(x.shape) < 2 or settings.shape != (rows, 3) or settings.dtype != "f32":
        found = f"x {x.shape}, settings {settings.shape} of dtype {settings.dtype}"
        raise bad_op(name, found, "[m, ...] and f32 [m, 3]")
    inner = axis_names("v", len(x.shape) - 1)
    axes = [Axis(name="m", extent=rows), Axis(name="i", extent=3, role="reduce")]
    axes += [Axis(name=n, extent=e, role="reduce") for n, e in zip(inner, x.shape[1:], strict=True)]
    axes.append(Axis(name="j", extent=2, role="scatter"))
    out = Tensor(name=name, shape=(rows, 2), dtype="f32")
    reads = [access(x, "m", *inner), access(settings, "m", "i")]
    return make_op(name, "cutoff", axes, reads, [access(out, "m", "j")]), (out,)


def sample(name: str, x: Tensor, limits: Tensor, seeds: Tensor, positions: Tensor) -> Built:
    """An index of each row of logits x [m, v], sampled by their softmax over a temperature: outputs
    [name].value f32 and [name] i64, [m].

    limits [m, 2] f32: temperature, least logit that may be sampled. seeds, positions: i64 [m]; the
    sample depends on them and on the logits alone. It is the argmax of logit + temperature * noise,
    with Gumbel noise of its own for each seed, position and index, so that ranks that hold parts
    of a row sample together as they find an argmax together.
    """
    rows = x.shape[:1]
    shapes = (limits.shape, seeds.shape, positions.shape)
    if len(x.shape) != 2 or shapes != ((*rows, 2), rows, rows) or limits.dtype != "f32":
        found = f"x {x.shape}, limits {limits.shape} of dtype {limits.dtype}, "
        found += f"seeds {seeds.shape}, positions {positions.shape}"
        raise bad_op(name, found, "[m, v], f32 [m, 2], [m], [m]")
    require_integers(name, seeds)
    require_integers(name, positions)
    axes = [Axis(name="m", extent=rows[0])]
    axes.append(Axis(name="v", extent=x.shape[1], role="reduce", combine="argmax"))
    axes.append(Axis(name="j", extent=2, role="reduce"))
    value = Tensor(name=f"{name}.value", shape=rows, dtype="f32")
    chosen = Tensor(name=name, shape=rows, dtype="i64")
    reads = [access(x, "m", "v"), access(limits, "m", "j")]
    reads += [access(seeds, "m"), access(positions, "m")]
    writes = [access(value, "m"), access(chosen, "m")]
    return make_op(name, "sample", axes, reads, writes), (value, chosen)


define(OpKind(name="argmax", masks_padding=True, flops=one_a_point))
define(OpKind(name="top", chooses_token=True))
define(OpKind(name="cutoff", chooses_token=True))
define(OpKind(name="sample", chooses_token=True, masks_padding=True, flops=one_a_point))
