"""torchrun's agent, for launch/torchrun.sh: `python -m distmega.launch.agent`, and torchrun's own
arguments.

A signal that ends it gives its exit code, 128 and its number, in place of a traceback and 1. Next:
launch/torchrun.py, in the ranks that it starts.
"""

import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.run import main


def run() -> int:
    """Starts the ranks and waits for them; the exit code. An error of a rank is torchrun's to
    tell.
    """
    try:
        main()
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(run())
