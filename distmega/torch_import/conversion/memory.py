"""How results lie in torch's memory: which are views of what, which overlap, in what order of dims.

In: nodes of an exported graph. Out: views, by which a tensor of the program becomes a result that
shares the memory which it shares in torch. Used by outputs.py and ../captured.py.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from distmega.torch_import.conversion.graph import Views
from distmega.torch_import.conversion.nodes import viewed_node

VIEWS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten.view.default: torch.ops.aten.reshape.default
}
"""What does for views of inputs with other strides than those at capture."""


def apply_views(x: Tensor, views: Views) -> Tensor:
    """The view of x."""
    for view, more, options in views:
        x = view(x, *more, **options)
    return x


def sources(node: fx.Node) -> Iterator[tuple[fx.Node, Views]]:
    """A node, what it is a view of, what that is a view of and so on; each with the views between.
    Several views together, as of a split, are left out.
    """
    views: Views = ()
    while True:
        if isinstance(node.meta.get("val"), Tensor):
            yield node, views
        source = viewed_node(node)
        if source is None or not callable(node.target):
            return
        views = ((VIEWS.get(node.target, node.target), node.args[1:], node.kwargs), *views)
        node = source


def overlapping(
    results: Iterable[fx.Node], known: Collection[fx.Node]
) -> dict[fx.Node, tuple[fx.Node, Views]]:
    """Of results that share memory with others: the node that they are views of, and how. known:
    nodes that may be that one.
    """
    members: defaultdict[fx.Node, list[tuple[fx.Node, Views]]] = defaultdict(list)
    for node in results:
        way = [(source, views) for source, views in sources(node) if source in known]
        if way:  # else it is a number
            root, views = way[-1]
            members[root].append((node, views))
    return {
        node: (root, views)
        for root, found in members.items()
        if len(found) > 1 and overlap(_parts(root.meta["val"], [views for _, views in found]))
        for node, views in found
    }


def _parts(like: Tensor, ways: Sequence[Views]) -> list[Tensor]:
    """Views of a tensor like that, which has no values."""
    whole = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
    return [apply_views(whole, views) for views in ways]


def order_of_dims(like: Tensor) -> list[int]:
    """Dims from the one of the longest steps on; others stay where they are. Of a tensor
    that repeats elements as they are.
    """
    steps = like.stride()
    moving = [dim for dim, extent in enumerate(like.shape) if extent > 1]
    if any(steps[dim] == 0 for dim in moving):
        return [*range(like.dim())]
    moving.sort(key=lambda dim: -steps[dim])
    order = iter(moving)
    return [next(order) if extent > 1 else dim for dim, extent in enumerate(like.shape)]


def overlap(tensors: Iterable[Tensor]) -> bool:
    """Whether any two lie in the same memory; also where only the ranges do in which they lie."""
    ranges: dict[int, list[tuple[int, int]]] = {}
    for x in tensors:
        if x.numel() == 0:
            continue
        last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
        start = x.storage_offset() * x.element_size()
        stop = start + (last + 1) * x.element_size()
        storage = x.untyped_storage()
        where = storage._cdata if x.is_meta else storage.data_ptr()
        others = ranges.setdefault(where, [])
        if any(start < end and begin < stop for begin, end in others):
            return True
        others.append((int(start), int(stop)))
    return False
