"""Captured modules on several ranks of one process, beside the module itself."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from distmega import DeviceMesh
from distmega.sharding.layout.placements import Layout
from distmega.torch_import import Captured, CapturedModule, capture
from tests.hostir.threads import ThreadCommunicator, Wires

TOLERANCE = 1e-4


def open_ranks(
    captured: Captured, num_ranks: int, annotations: Mapping[str, Layout] | None = None
) -> list[CapturedModule]:
    """The module on each rank of a mesh tp=num_ranks."""
    mesh = DeviceMesh(tp=num_ranks)
    wires = Wires(mesh)
    return [
        CapturedModule(
            captured, ThreadCommunicator(mesh, rank, wires), mesh, "cpu", annotations or {}
        )
        for rank in range(num_ranks)
    ]


def call(ranks: Sequence[CapturedModule], *args: Any, **kwargs: Any) -> Any:
    """What all ranks give, which must be the same."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        outs = list(pool.map(lambda rank: rank(*args, **kwargs), ranks))
    for out in outs[1:]:
        assert_close(out, outs[0])
    return outs[0]


def assert_close(found: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
    """Equal structures, types and shapes, and values of floats within the tolerance."""
    mine, others = pytree.tree_leaves(found), pytree.tree_leaves(expected)
    assert len(mine) == len(others)
    for x, y in zip(mine, others, strict=True):
        if not isinstance(y, Tensor):
            assert x == y
        elif y.is_floating_point() or y.is_complex():
            torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance, equal_nan=True)
        else:
            assert torch.equal(x, y)


def check_module(
    module: nn.Module, *calls: tuple[Any, ...], ranks: Sequence[int] = (1, 2)
) -> Captured:
    """Captures the module for the first call, and compares all calls with it, in order."""
    captured = capture(module, calls[0])
    groups = [open_ranks(captured, num_ranks) for num_ranks in ranks]
    with torch.no_grad():
        expected = [pytree.tree_map(_copied, module(*args)) for args in calls]
    for group in groups:
        for args, wanted in zip(calls, expected, strict=True):
            assert_close(call(group, *args), wanted)
    return captured


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
