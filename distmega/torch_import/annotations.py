"""Layouts by patterns of names: {"*.up_proj.weight": shard(0, "tp")}.

In: a program and a user's patterns. Out: annotations by tensor name, as plan_program takes them.
"""

import difflib
from collections.abc import Mapping
from fnmatch import fnmatchcase

from distmega.arguments import shown
from distmega.errors import PlanError
from distmega.program.types import Program
from distmega.sharding.layout.placements import Layout

NO_ALIASES: Mapping[str, str] = {}


def match_annotations(
    program: Program, patterns: Mapping[str, Layout], aliases: Mapping[str, str] = NO_ALIASES
) -> dict[str, Layout]:
    """Layouts of the weights, states and inputs that patterns name; the later of two patterns wins.

    A pattern is a tensor's name or a module's, with the wildcards * ? [ ]; of a module, it means
    its parameters and buffers. aliases: all names that a module has for its tensors; those of
    the program are asked for what none of these is. PlanError for a pattern that names nothing, and
    for what is no mapping.
    """
    if not isinstance(patterns, Mapping):
        raise PlanError(
            f"annotations {shown(patterns)}",
            expected="a mapping of patterns of names to layouts",
            remedy='write {"*.up_proj.weight": shard(0, "tp")}',
        )
    names = [tensor.name for tensor in program.tensors if tensor.role != "temp"]
    others = {*names}.difference(aliases.values())
    ways = (
        {**aliases, **{name: name for name in names if name in others}},
        {name: name for name in names},
    )
    found: dict[str, Layout] = {}
    for pattern, layout in patterns.items():
        if not isinstance(pattern, str):
            raise PlanError(
                f"annotation of {shown(pattern)}",
                expected="a pattern of names",
                remedy='write {"*.up_proj.weight": shard(0, "tp")}',
            )
        matched = next(filter(None, (_matched(pattern, known) for known in ways)), [])
        if not matched:
            close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3)
            raise PlanError(
                f"annotation of {shown(pattern)}, which names nothing in {program.name!r}",
                expected="a weight, state, input or module, * for any part of its name",
                remedy=f"names are like {', '.join(close or names[:3])}",
            )
        found |= dict.fromkeys(matched, layout)
    return found


def _matched(pattern: str, known: Mapping[str, str]) -> list[str]:
    """What a pattern names, itself or as a module."""
    named = [known[name] for name in known if fnmatchcase(name, pattern)]
    return named or [known[name] for name in known if fnmatchcase(name, f"{pattern}.*")]
