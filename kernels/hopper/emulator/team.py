"""Ranks, their agents and their launches, as both emulated kernels have them.

In: SMs of each rank and what their partitions do. Out: launches that end when all partitions have
and all stores are visible. Next on the walk: one_row/kernel.py.
"""

from collections.abc import Callable, Sequence

import torch

from distmega.kernels.hopper.emulator.clocks import Agent
from distmega.kernels.hopper.emulator.interleaving import Interleaving, Steps
from distmega.kernels.hopper.emulator.sm import Running, Sm


class Agents:
    """Both partitions of every SM of every rank, and the hosts. num: of all."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """sizes: SMs of each rank."""
        self.num = 2 * sum(sizes) + len(sizes)
        numbers = iter(range(self.num))

        def each(rank: int, num: int, part: str) -> list[Agent]:
            return [Agent(next(numbers), self.num, rank, sm, part) for sm in range(num)]

        self.computes = [each(rank, num, "compute") for rank, num in enumerate(sizes)]
        self.loaders = [each(rank, num, "loader") for rank, num in enumerate(sizes)]
        self.hosts = [Agent(next(numbers), self.num, r, -1, "host") for r in range(len(sizes))]


def run_hosts(order: Interleaving, hosts: Sequence[Steps], sms: Sequence[Sequence[Sm]]) -> None:
    """Runs a host a rank to the end, each of which launches what its SMs do."""
    for each in sms:
        for sm in each:
            order.add(sm.stores)
            order.add(sm.ring)
    for rank, steps in enumerate(hosts):
        order.add(Running("host", rank, -1, steps, _silent))
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for a few numbers at a time
    try:
        order.run()
    finally:
        torch.set_num_threads(num_threads)


def launch(
    order: Interleaving, host: Agent, sms: Sequence[Sm], parts: Sequence[Callable[[int], Steps]]
) -> Steps:
    """Steps of a host: starts both partitions of its SMs, each with an empty ring, and waits for
    all of them. parts: what compute warps and loader of an SM do, by its number.
    """
    left = [2 * len(sms)]

    def until(steps: Steps, rank: int) -> Steps:
        yield from steps
        left[0] -= 1
        order.wake(("host", rank, 0))

    def says(sm: Sm) -> Callable[[], str]:
        return lambda: sm.waiting

    for sm in sms:
        for agent in (sm.compute, sm.loader):
            agent.meet(host)
        sm.begun.clear()
        sm.ring.clear()
        waits = says(sm), _silent
        for kind, part, wait in zip(("compute", "loader"), parts, waits, strict=True):
            order.add(Running(kind, host.rank, sm.sm, until(part(sm.sm), host.rank), wait))
    while left[0] or not all(sm.stores.is_empty() for sm in sms):
        yield "host", host.rank, 0
    for sm in sms:
        host.meet(sm.compute)
        host.meet(sm.loader)
    host.fence()


def _silent() -> str:
    return ""
