"""Ranks that planned otherwise than others: all of them name the same ones."""

from types import SimpleNamespace
from typing import Any

import pytest

from distmega.engine.ranks.agreement import require_agreement
from distmega.errors import LaunchError
from distmega.sharding.layout.mesh import DeviceMesh

MESH = DeviceMesh(pp=2, tp=2)
PLANS = [(("cut",), rank // 2, [f"stage {rank // 2}"]) for rank in range(4)]


def refusals(found: list[tuple[tuple[str, ...], int, list[str]]]) -> list[str]:
    """What each rank is told."""
    told = []
    comm: Any = SimpleNamespace(mesh=MESH, all_gather_object=lambda _mine: found)
    for cuts, index, fingerprints in found:
        plan: Any = SimpleNamespace(cuts=cuts, stage=index)
        with pytest.raises(LaunchError) as failure:
            require_agreement(comm, plan, fingerprints)
        told.append(failure.value.found)
    return told


@pytest.mark.parametrize(
    ("rank", "change"),
    [(2, (("elsewhere",), 1, ["stage 1"])), (3, (("cut",), 1, ["another"]))],
)
def test_all_ranks_name_those_that_planned_otherwise(
    rank: int, change: tuple[tuple[str, ...], int, list[str]]
):
    found = [change if each == rank else plan for each, plan in enumerate(PLANS)]
    said = f"ranks [{rank}] made another plan than the first of the mesh or of their stage"
    assert refusals(found) == [said] * MESH.num_ranks
