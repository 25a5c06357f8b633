"""`python -m distmega` and `torchrun ... -m distmega`: the command line. Next:
distmega/cli/main.py."""

import sys

from distmega.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
