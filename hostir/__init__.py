"""The host level: what a rank's process does, as a program that prints, is proven and is run.

`lower_program` makes one of a localised plan, `run_passes` improves it, `print_host` and
`parse_host` turn it to text and back, `check_host` proves those of all ranks together, `Evaluator`
runs it with a communicator. See docs/walk.md.
"""

from typing import TYPE_CHECKING

from distmega.lazy import names_from

if TYPE_CHECKING:
    from distmega.hostir.check.check import check_host as check_host
    from distmega.hostir.comm.communicator import Communicator as Communicator
    from distmega.hostir.comm.communicator import GlooCommunicator as GlooCommunicator
    from distmega.hostir.comm.communicator import SingleCommunicator as SingleCommunicator
    from distmega.hostir.comm.nccl import NcclCommunicator as NcclCommunicator
    from distmega.hostir.ir.nodes import HostProgram as HostProgram
    from distmega.hostir.ir.text import parse_host as parse_host
    from distmega.hostir.ir.text import print_host as print_host
    from distmega.hostir.lower.lower import lower_program as lower_program
    from distmega.hostir.passes.passes import run_passes as run_passes
    from distmega.hostir.run.evaluator import Evaluator as Evaluator

_HOMES = {
    "HostProgram": "hostir.ir.nodes",
    "lower_program": "hostir.lower.lower",
    "run_passes": "hostir.passes.passes",
    "print_host": "hostir.ir.text",
    "parse_host": "hostir.ir.text",
    "check_host": "hostir.check.check",
    "Evaluator": "hostir.run.evaluator",
    "Communicator": "hostir.comm.communicator",
    "SingleCommunicator": "hostir.comm.communicator",
    "GlooCommunicator": "hostir.comm.communicator",
    "NcclCommunicator": "hostir.comm.nccl",
}
"""Public name -> its module."""

__all__ = [*_HOMES]
__getattr__ = names_from(__name__, _HOMES)
