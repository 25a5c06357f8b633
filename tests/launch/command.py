"""A command as torchrun would start it: python -m tests.launch.command TARGET PAYLOAD NUM_RANKS
TIMEOUT_S.
"""

import os
import sys

from distmega.errors import DistmegaError
from distmega.launch.contract import LauncherOptions
from distmega.launch.launchers import choose_launcher, choose_num_ranks, launch, should_report


def main(target: str, payload: str, num_ranks: str, timeout_s: str) -> int:
    launcher = choose_launcher("auto")
    rank = os.environ.get("RANK", "none")
    try:
        options = LauncherOptions(
            launcher=launcher,
            num_ranks=choose_num_ranks(launcher, int(num_ranks)),
            timeout_s=float(timeout_s),
        )
        for event in launch(f"tests.launch.targets:{target}", int(payload), options):
            print(f"rank {rank}: {event}", flush=True)
    except DistmegaError as error:
        if should_report():
            print(f"error by rank {rank}: {type(error).__name__}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
