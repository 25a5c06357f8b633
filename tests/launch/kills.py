"""A launcher whose ranks are to be killed from outside: python -m tests.launch.kills.

Reads a number of ranks a line, starts so many, and prints what happens as JSON, a line each: the
processes of the ranks, the first value, the error that ends them.
"""

import json
import pickle
import sys

from distmega.errors import DistmegaError
from distmega.launch.contract import Job, RayOptions
from distmega.launch.local import LocalTeam
from distmega.launch.supervise import supervise

LIMIT_S = 120.0


def tell(what: object) -> None:
    print(json.dumps(what), flush=True)


class TellingTeam(LocalTeam):
    """Tells the processes of its ranks as soon as they are."""

    def start(self) -> float:
        started_s = super().start()
        tell([rank.process.pid for rank in self.ranks])
        return started_s


def run(num_ranks: int) -> None:
    """Starts ranks that never end by themselves."""
    job = Job(
        target="tests.launch.targets:reduce_forever",
        payload=pickle.dumps(None),
        num_ranks=num_ranks,
        device="cpu",
        timeout_s=LIMIT_S,
        start_timeout_s=LIMIT_S,
        ray=RayOptions(),
    )
    try:
        for event in supervise(TellingTeam(job), job):
            tell(event.value)
    except DistmegaError as error:
        tell([type(error).__name__, error.found])


if __name__ == "__main__":
    for line in sys.stdin:
        run(int(line))
