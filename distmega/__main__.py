"""`distmega`, `python -m distmega` and `torchrun ... -m distmega`: the command line. Next:
distmega/cli/main.py."""

import sys

from distmega.cli import late


def run() -> int:
    """The command; its exit code. Ctrl-C ends it quietly while its code is still being loaded."""
    try:
        return late.main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(run())
