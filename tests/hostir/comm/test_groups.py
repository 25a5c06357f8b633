"""Groups of communicators that are gone: closed where all of their ranks have left them, never
forgotten.
"""

from types import SimpleNamespace

import pytest

from distmega.hostir.comm import groups
from distmega.hostir.comm.groups import close_left


def test_a_group_that_is_left_while_ranks_meet_is_told_of_the_next_time(
    monkeypatch: pytest.MonkeyPatch,
):
    """Garbage is collected anywhere, here between what a rank looks up and what it tells."""
    early, late = (SimpleNamespace(group_name=name) for name in ("early", "late"))
    closed: list[object] = []
    monkeypatch.setattr(groups, "_left", [early])
    monkeypatch.setattr(groups, "_is_open", lambda group: group not in closed)
    monkeypatch.setattr(groups.dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(groups.dist, "get_backend", lambda group: "gloo")
    monkeypatch.setattr(groups.dist, "destroy_process_group", closed.append)
    told: list[list[str]] = []

    def gather(mine: list[str]) -> list[list[str]]:
        told.append(mine)
        if late not in groups._left and len(told) == 1:
            groups._left.append(late)
        return [mine, ["early", "late"]]

    close_left(gather, (0, 1))
    assert (told, closed, groups._left) == ([["early"]], [early], [late])
    close_left(gather, (0, 1))
    assert (told[1:], closed, groups._left) == ([["late"]], [early, late], [])
