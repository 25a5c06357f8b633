"""Queues of virtual SMs for an EventGraph: made, proven, and run by an interpreter.

An EventGraph and a number of SMs come in; Queues go out, static ones and regions that are drained
because the data decide their size, whose waits are enough for every value of what is unknown. Start
at assign.py, then knowledge.py; check.py proves, interpret.py runs.
"""

from distmega.kernels.events.queues.check import check_queues
from distmega.kernels.events.queues.cost import GroupTiles, drains_groups_faster
from distmega.kernels.events.queues.interpret import run_queues, run_ranks
from distmega.kernels.events.queues.knowledge import make_queues

__all__ = [
    "GroupTiles",
    "check_queues",
    "drains_groups_faster",
    "make_queues",
    "run_queues",
    "run_ranks",
]
