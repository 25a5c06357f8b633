"""Attention under any mask: kind `attend`, as torch's scaled_dot_product_attention.

As compute.py: names and tensors in, the Op and the tensor it writes out. Attention over a cache
whose mask follows from positions is kind `attention` there.
"""

import math
from dataclasses import replace

from distmega.program.kinds import define
from distmega.program.ops.compute import ATTENTION
from distmega.program.ops.parts import Built, access, bad_op, index, make_op
from distmega.program.types import Access, Axis, Index, Tensor

_AXES = ("b", "h", "g", "m", "t")


def attend(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float = 0.0,
) -> Built:
    """softmax(cap(scale * q k') + mask) v of q [b, h g, m, d], k [b, h, t, d] and v [b, h, t, e].

    h is the kv head, g the query head within its group; out [b, h g, m, e], of q's type, softmax in
    fp32. mask: bool (what may be seen) or floats (added), of four dims that are 1 or those of [b,
    h g, m, t]. A row that may see nothing is zero. softcap: cap(x) = softcap * tanh(x / softcap).
    """
    shapes = [x.shape for x in (q, k, v, mask) if x is not None]
    expected = "q [b, h g, m, d], k [b, h, t, d], v [b, h, t, e], a mask of four dims"
    if any(len(shape) != 4 for shape in shapes):
        raise bad_op(name, f"shapes {', '.join(map(str, shapes))}", expected)
    (b, heads, m, d), (_, h, t, e) = q.shape, v.shape
    if k.shape != (b, h, t, d) or v.shape[0] != b or heads % h:
        raise bad_op(name, f"shapes {', '.join(map(str, shapes))}", expected)
    if not (math.isfinite(scale) and math.isfinite(softcap) and softcap >= 0):
        found = f"scale {scale}, softcap {softcap}"
        raise bad_op(name, found, "a finite scale, a softcap of at least 0", "change these")
    group = heads // h
    sizes = zip(_AXES[:4], (b, h, group, m), strict=True)
    axes = [Axis(name=n, extent=x) for n, x in sizes] + [Axis(name="e", extent=e)]
    axes += [Axis(name="d", extent=d, role="reduce"), Axis(name="t", extent=t, role="reduce")]
    joined = index("h", "g")
    reads = [Access(tensor=q.name, dims=(index("b"), joined, index("m"), index("d")))]
    reads += [access(k, "b", "h", "t", "d"), access(v, "b", "h", "t", "e")]
    if mask is not None:
        reads.append(_mask_access(name, mask, (b, heads, m, t)))
    out = Tensor(name=name, shape=(b, heads, m, e), dtype=q.dtype)
    write = Access(tensor=name, dims=(index("b"), joined, index("m"), index("e")))
    return make_op(name, "attend", axes, reads, [write], scale=scale, softcap=softcap), (out,)


def _mask_access(name: str, mask: Tensor, whole: tuple[int, ...]) -> Access:
    if any(mine not in (1, extent) for mine, extent in zip(mask.shape, whole, strict=True)):
        raise bad_op(name, f"mask {mask.shape}", f"dims that are 1 or those of {whole}")
    if mask.dtype in ("i32", "i64"):
        raise bad_op(name, f"mask of dtype {mask.dtype}", "bool, or a float type")
    names = (("b",), ("h", "g"), ("m",), ("t",))
    dims = zip(names, mask.shape, whole, strict=True)
    return Access(
        tensor=mask.name,
        dims=tuple(index(*axes) if mine == extent else Index() for axes, mine, extent in dims),
    )


define(replace(ATTENTION, name="attend", reads_positions=False, host_reads=""))
