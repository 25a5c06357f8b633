"""Event tensors in full: what waits for what where run-time numbers and data decide how much runs.

A Program comes in with the extents of its tiles; an EventGraph goes out, whose event tensors have
any number of dims, maps from task coordinates to events, and extents and counts that are numbers,
symbols or read from a tensor. From it come queues, static and drained, a proof for every value of
what is unknown, and an interpreter. Start at values.py, then analyse.py; queues/ follows.
"""

from distmega.kernels.events.analyse import analyse_events, choose_tilings
from distmega.kernels.events.graph import EventGraph
from distmega.kernels.events.queues import (
    GroupTiles,
    check_queues,
    drains_groups_faster,
    make_queues,
    run_queues,
    run_ranks,
)
from distmega.kernels.events.text import parse_events, print_events
from distmega.kernels.events.values import RunTime

__all__ = [
    "EventGraph",
    "GroupTiles",
    "RunTime",
    "analyse_events",
    "check_queues",
    "choose_tilings",
    "drains_groups_faster",
    "make_queues",
    "parse_events",
    "print_events",
    "run_queues",
    "run_ranks",
]
