"""What ranks decide together, before any of them does something that needs the others.

Comes in: what one rank sees. Goes out: the same answer or error on every rank that asks. Used by
engine.py, opening.py, compiled/lowering.py and compiled/program.py.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from distmega.engine.decode_plan import DecodePlan
from distmega.engine.requests import EngineOptions
from distmega.errors import LaunchError, UnsupportedError, argument, counted
from distmega.hostir.comm.communicator import Communicator

T = TypeVar("T")


def share_memory(mates: Sequence[tuple[str, str]], options: EngineOptions) -> bool:
    """Whether collectives run inside the megakernel; the same answer on every rank of a stage.

    mates: host and problem with shared memory of each of them.
    """
    nodes = {name for name, _ in mates}
    problems = {problem for _, problem in mates if problem}
    if len(nodes) > 1:
        problems.add(f"ranks are on {counted(len(nodes), 'host')} ({', '.join(sorted(nodes))})")
    if options.collectives == "kernel" and problems:
        raise LaunchError(
            f"{argument('collectives')} kernel, but {'; '.join(sorted(problems))}",
            expected="ranks that share memory",
            remedy=f"use {argument('collectives')} host or auto",
        )
    return options.collectives != "host" and not problems


def on_all_ranks(comm: Communicator, make: Callable[[], T] | None) -> T | None:
    """What `make` gives on this rank; None, everywhere, where some rank has nothing to make.
    UnsupportedError, everywhere, that names the first rank on which it raised one.
    """
    made, problem = None, None
    try:
        made = make() if make else None
    except UnsupportedError as error:
        problem = error
    reported = (problem.found, problem.expected, problem.remedy) if problem else None
    answers = comm.all_gather_object((made is not None, reported))
    for rank, (_, theirs) in zip(comm.mesh.ranks, answers, strict=True):
        if theirs:
            found, expected, remedy = theirs
            raise UnsupportedError(f"rank {rank}: {found}", expected=expected, remedy=remedy)
    return made if all(has_made for has_made, _ in answers) else None


def require_equal(comm: Communicator, what: str, mine: Sequence[str]) -> None:
    """All ranks must have found the same texts; LaunchError, everywhere, that names those who did
    not. what: that they are of.
    """
    found = zip(comm.mesh.ranks, comm.all_gather_object([*mine]), strict=True)
    (first, theirs), *others = found
    differing = [rank for rank, texts in others if texts != theirs]
    if differing:
        raise LaunchError(
            f"ranks {differing} compiled {what} otherwise than rank {first}",
            expected="the same plan, host program and kernels on every rank",
            remedy="run the same version of distmega, with the same program, options, rules and "
            "measured times, on every rank",
        )


def require_agreement(comm: Communicator, plan: DecodePlan, fingerprints: list[str]) -> None:
    """All ranks must have cut the program at the same places, those of a stage have planned the
    same; LaunchError, everywhere, that names those who did not.
    """
    mine = plan.cuts, plan.stage, fingerprints
    found = dict(zip(comm.mesh.ranks, comm.all_gather_object(mine), strict=True))
    first_cuts, _, _ = found[comm.mesh.ranks[0]]
    first = {index: theirs for _, index, theirs in reversed(found.values())}
    differing = [
        rank
        for rank, (cuts, index, theirs) in found.items()
        if cuts != first_cuts or theirs != first[index]
    ]
    if differing:
        raise LaunchError(
            f"ranks {differing} made another plan than the first of the mesh or of their stage",
            expected="the same plan and kernels on every rank of a stage",
            remedy="run the same version of distmega, model and options on every rank",
        )
