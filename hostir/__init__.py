"""The host level: what a rank's process does, as a program that prints, is proven and is run.

`lower_program` makes one of a localised plan, `run_passes` improves it, `print_host` and
`parse_host` turn it to text and back, `check_host` proves those of all ranks together, `Evaluator`
runs it with a communicator. See README.md, "the walk through the code".
"""

from typing import TYPE_CHECKING

from distmega.lazy import names_from

if TYPE_CHECKING:
    from distmega.hostir.check import check_host as check_host
    from distmega.hostir.comm import Communicator as Communicator
    from distmega.hostir.comm import GlooCommunicator as GlooCommunicator
    from distmega.hostir.comm import SingleCommunicator as SingleCommunicator
    from distmega.hostir.evaluator import Evaluator as Evaluator
    from distmega.hostir.lower import lower_program as lower_program
    from distmega.hostir.nccl import NcclCommunicator as NcclCommunicator
    from distmega.hostir.nodes import HostProgram as HostProgram
    from distmega.hostir.passes import run_passes as run_passes
    from distmega.hostir.text import parse_host as parse_host
    from distmega.hostir.text import print_host as print_host

_HOMES = {
    "HostProgram": "hostir.nodes", "lower_program": "hostir.lower", "run_passes": "hostir.passes",
    "print_host": "hostir.text", "parse_host": "hostir.text", "check_host": "hostir.check",
    "Evaluator": "hostir.evaluator", "Communicator": "hostir.comm",
    "SingleCommunicator": "hostir.comm", "GlooCommunicator": "hostir.comm",
    "NcclCommunicator": "hostir.nccl",
}  # fmt: skip
"""Public name -> its module."""

__all__ = [*_HOMES]
__getattr__ = names_from(__name__, _HOMES)
