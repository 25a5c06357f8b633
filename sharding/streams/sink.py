"""Which ops of host loops run later than they could, in the loop of those that use their results.

Comes in: the earliest level of each op, what has to come before what, and who touches which
storage. Goes out: final levels. An op that moves into the only loop which needs its result gives it
a chunk at a time; in the first loop that it fits in, all chunks would have to be kept. Used by
host_loops.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Op `one` comes before op `two`; shared: they may also be in one iteration of a loop."""

    one: int
    two: int
    shared: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A temporary: its elements, the ops that write it and that touch it. cuts: all of them do so
    in equal chunks, so that a chunk at a time is enough where they share a loop.
    """

    size: int
    writers: frozenset[int]
    users: frozenset[int]
    cuts: bool


def sink_ops(
    levels: Sequence[int], edges: Sequence[Edge], storages: Sequence[Storage]
) -> list[int]:
    """Levels in which ops that share a loop with all of their users have sunk to them, where the
    elements that need not be kept outnumber those that are kept longer. Linear in edges.
    """
    late = _latest(levels, edges)
    teams = _teams(levels, late, edges)
    touched: dict[int, list[Storage]] = {}
    for storage in storages:
        for team in {teams[op] for op in storage.users if op in teams}:
            touched.setdefault(team, []).append(storage)
    sunk = list(levels)
    saved = {
        team: sum(_saved(each, team, teams, levels, late[team]) for each in touched.get(team, ()))
        for team in set(teams.values())
    }
    for op, team in teams.items():
        if saved[team] > 0:
            sunk[op] = late[op]
    return sunk


def _latest(levels: Sequence[int], edges: Sequence[Edge]) -> list[int]:
    """The level of an op's users, where it shares a loop with each and they are in one level."""
    after: dict[int, list[Edge]] = {}
    for edge in edges:
        after.setdefault(edge.one, []).append(edge)
    late = list(levels)
    for op in reversed(range(len(levels))):
        found = {late[edge.two] if edge.shared else -1 for edge in after.get(op, ())}
        if len(found) == 1 and -1 not in found:
            late[op] = found.pop()
    return late


def _teams(levels: Sequence[int], late: Sequence[int], edges: Sequence[Edge]) -> dict[int, int]:
    """Ops that can sink -> one of those that sink with them, because they share results."""
    teams = {op: op for op, level in enumerate(late) if level > levels[op]}

    def find(op: int) -> int:
        while teams[op] != op:
            teams[op] = teams[teams[op]]
            op = teams[op]
        return op

    for edge in edges:
        if edge.one in teams and edge.two in teams and late[edge.one] == late[edge.two]:
            teams[find(edge.one)] = find(edge.two)
    return {op: find(op) for op in teams}


def _saved(
    storage: Storage, team: int, teams: Mapping[int, int], levels: Sequence[int], goal: int
) -> int:
    """Elements of a storage that need not be kept if a team sinks; negative if they must be."""
    others = [op for op in storage.users if teams.get(op) != team]
    if any(teams.get(op) == team for op in storage.writers):
        saves = storage.cuts and others and all(levels[op] == goal for op in others)
        return storage.size if saves else 0
    return 0 if any(levels[op] >= goal for op in others) else -storage.size
