"""How one element of a row is chosen: the largest, or one sampled among the most likely.

As compute.py: names and tensors in, the Op and the tensors it writes out. A sample is the argmax of
logit + temperature * Gumbel noise (noise.py), which depends on the seed, the position and the index
alone. The CPU megakernel's instructions compute by the functions here, too.
"""

import math
from collections.abc import Callable
from typing import Any

from distmega.program.kinds import (
    Coordinate,
    OpKind,
    define,
    local_base,
    one_a_point,
    whole_numbers,
)
from distmega.program.ops.noise import gumbel
from distmega.program.ops.parts import (
    Built,
    access,
    as_stated,
    axis_names,
    bad_op,
    index,
    make_op,
    require_integers,
    whole_number,
)
from distmega.program.types import Access, Axis, Op, Tensor


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
    num_top = whole_number(name, "num_top", num_top)
    if len(x.shape) != 2 or not 1 <= num_top <= x.shape[-1]:
        found = f"the {num_top} largest of rows of {x.shape}"
        raise bad_op(name, found, "x [m, v] and at least 1, at most v of them")
    extent = x.shape[1]
    fitting = (n for n in range(1, MAX_PARTS + 1) if extent % n == 0 and extent // n >= num_top)
    return _top_of_parts(name, x, max(fitting), num_top)


def _top_of_parts(name: str, x: Tensor, num_parts: int, num_top: int) -> Built:
    """As top, of so many parts: ranks have some of them."""
    if len(x.shape) != 2 or num_parts < 1 or x.shape[1] % num_parts:
        raise bad_op(name, f"rows of {x.shape} in {num_parts} parts", "x [m, v], equal parts of v")
    rows, extent = x.shape
    if not 1 <= num_top <= extent // num_parts:
        found = f"the {num_top} largest of parts of {extent // num_parts}"
        raise bad_op(name, found, "at least 1, at most all of a part")
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


def argmax_values(x: Any, base: int = 0, extent: int | None = None) -> tuple[Any, Any]:
    """Largest element of the last dim and its index plus `base`, the lowest on ties; NaN if any is.

    x holds indices from `base` on; those not below `extent` are padding. With nothing but padding:
    least value, `base`.
    """
    num_valid = count_valid(x.shape[-1], base, extent)
    if num_valid:
        value, index = x[..., :num_valid].max(-1)
        return value, index + base
    least = -math.inf if x.is_floating_point() else -(1 << (8 * x.element_size() - 1))
    found = x.new_full(x.shape[:-1], least)
    return found, found.new_zeros(found.shape).long() + base


def count_valid(num: int, base: int, extent: int | None) -> int:
    """How many of `num` indices from `base` on are below `extent`, all of them where it is None."""
    return num if extent is None else max(0, min(num, extent - base))


def argmax_range(op: Op, coordinate: Coordinate) -> tuple[int, int | None]:
    """The base and extent of argmax_values for an op of kind argmax."""
    extent = int(str(op.get("extent", -1)))
    return local_base(op, coordinate), None if extent < 0 else extent


def top_values(x: Any, num_parts: int, num_top: int) -> Any:
    """The num_top largest of each of num_parts equal parts of rows [m, v], largest first."""
    return x.reshape(x.shape[0], num_parts, -1).topk(num_top, -1)[0]


def cutoff_values(x: Any, settings: Any) -> Any:
    """limits [m, 2] f32 of candidates x [m, ...] under settings [m, 3]; see cutoff.

    A temperature of 0 leaves the largest alone. Probabilities are summed in float64, largest first.
    """
    ordered = x.flatten(1).float().sort(-1, descending=True)[0]
    wide, num = ordered.double(), ordered.shape[1]
    temperature, top_k, top_p = settings.double().unsqueeze(-1).unbind(1)
    last = top_k.masked_fill(top_k <= 0, num).clamp(max=num).long() - 1
    likely = wide >= wide.gather(1, last)
    weights = ((wide - wide[:, :1]) / temperature.clamp(min=LEAST_HEAT)).exp()
    weights = weights.masked_fill(~likely, 0.0)
    above = weights.cumsum(-1) - weights
    within = (above < top_p * weights.sum(-1, keepdim=True)) | (top_p >= 1)
    within[:, 0].fill_(True)
    num_kept = (likely & within).sum(-1, keepdim=True).clamp(min=1)  # none where the largest is NaN
    limits = settings[:, :2].clone()
    limits[:, 1:] = ordered.gather(1, num_kept - 1)
    return limits


LEAST_HEAT = 2.0**-126
"""Temperatures are taken as at least this, the least normal f32."""


def sample_values(
    x: Any, limits: Any, seeds: Any, positions: Any, base: int, extent: int
) -> tuple[Any, Any]:
    """Value f32, logit + temperature * noise, and index of the sample of each row of x [m, v]; see
    sample. base, extent: as of argmax_values.

    Noise is made for what is kept, on other devices than the CPU for all: there the host would have
    to wait to learn how much is kept.
    """
    kept = ~(x.float() < limits[:, 1:])  # NaN too, which then is what is sampled
    if x.is_cpu:
        rows, columns = kept.nonzero().unbind(1)
        values = x.float().new_full(x.shape, -math.inf)
        heat, given = limits[rows, 0], (seeds[rows], positions[rows], columns + base)
        values[rows, columns] = _add_noise(x[rows, columns], heat, *given)
    else:
        values = noisy_values(x, kept, limits, seeds, positions, base)
    return argmax_values(values, base, extent)


def noisy_values(x: Any, kept: Any, limits: Any, seeds: Any, positions: Any, base: int) -> Any:
    """What sample_values takes the largest of, [m, v] f32, -inf where not kept."""
    columns = whole_numbers(seeds, x.shape[1]) + base
    values = _add_noise(x, limits[:, :1], seeds.unsqueeze(1), positions.unsqueeze(1), columns)
    return values.masked_fill(~kept, -math.inf)


def _add_noise(x: Any, heat: Any, seeds: Any, positions: Any, ids: Any) -> Any:
    """x + heat * noise, f32, of operands that broadcast."""
    return (x.double() + heat.double() * gumbel(seeds, positions, ids)).float()


def _argmax_reference(op: Op, coordinate: Coordinate) -> Callable[..., Any]:
    base, extent = argmax_range(op, coordinate)
    return lambda x: argmax_values(x, base, extent)


def _top_reference(op: Op, coordinate: Coordinate) -> Callable[..., Any]:
    num_parts, num_top = op.axis("s").extent, op.axis("c").extent
    return lambda x: top_values(x, num_parts, num_top)


def _sample_reference(op: Op, coordinate: Coordinate) -> Callable[..., Any]:
    base = local_base(op, coordinate)
    extent = int(str(op.get("extent", op.axis("v").extent)))
    return lambda x, limits, seeds, positions: sample_values(
        x, limits, seeds, positions, base, extent
    )


define(
    OpKind(
        name="argmax",
        in_megakernel=True,
        combine="argmax",
        reads_whole=True,
        masks_padding=True,
        misfit=as_stated(lambda op, x: argmax(op.name, x)),
        flops=one_a_point,
        reference=_argmax_reference,
    )
)
define(
    OpKind(
        name="top",
        in_megakernel=True,
        reads_whole=True,
        chooses_token=True,
        picks_elements=True,
        misfit=as_stated(
            lambda op, x: _top_of_parts(op.name, x, op.extents.get("s", 0), op.extents.get("c", 0))
        ),
        reference=_top_reference,
    )
)
define(
    OpKind(
        name="cutoff",
        in_megakernel=True,
        reads_whole=True,
        chooses_token=True,
        misfit=as_stated(lambda op, x, settings: cutoff(op.name, x, settings)),
        reference=lambda op, coordinate: cutoff_values,
    )
)
define(
    OpKind(
        name="sample",
        in_megakernel=True,
        combine="argmax",
        reads_whole=True,
        chooses_token=True,
        masks_padding=True,
        misfit=as_stated(
            lambda op, x, limits, seeds, positions: sample(op.name, x, limits, seeds, positions)
        ),
        flops=one_a_point,
        reference=_sample_reference,
    )
)
