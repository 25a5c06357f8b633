"""The host level: what a rank's process does, as a program that prints, is proven and is run.

`lower_program` makes one of a localised plan, `run_passes` improves it, `print_host` and
`parse_host` turn it to text and back, `check_host` proves those of all ranks together, `Evaluator`
runs it with a communicator. See docs/walk.md.

ir/ has the nodes and their rules, lower/, passes/ and check/ what makes, improves and proves
programs, run/ what runs them; library/ computes ops by torch, comm/ joins ranks.
"""

from typing import TYPE_CHECKING

from distmega.lazy import late_imports

if TYPE_CHECKING:
    from distmega.hostir.check.check import check_host
    from distmega.hostir.comm.communicator import Communicator, GlooCommunicator, SingleCommunicator
    from distmega.hostir.comm.nccl import NcclCommunicator
    from distmega.hostir.ir.nodes import HostProgram
    from distmega.hostir.ir.text import parse_host, print_host
    from distmega.hostir.lower.lower import lower_program
    from distmega.hostir.passes.passes import run_passes
    from distmega.hostir.run.evaluator import Evaluator

__all__ = [
    "Communicator",
    "Evaluator",
    "GlooCommunicator",
    "HostProgram",
    "NcclCommunicator",
    "SingleCommunicator",
    "check_host",
    "lower_program",
    "parse_host",
    "print_host",
    "run_passes",
]

__getattr__ = late_imports(__name__)
