"""`distmega doctor`: prints what findings.py says of this machine; calibration.py measures it."""

from dataclasses import dataclass

from rich.console import Console

from distmega.cli.calibration import calibrate_machine
from distmega.cli.findings import examine, gather_facts
from distmega.cli.streams import say
from distmega.errors import LaunchError, counted


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Say what this machine has, what does not fit, and what to do about it."""

    calibrate: bool = False
    """Measure on this machine's GPUs what the choice of overlap needs, and keep it."""


def run_doctor(command: Doctor, console: Console) -> None:
    """Prints the findings; LaunchError where ranks can't run."""
    facts = gather_facts()
    findings = examine(facts)
    for finding in findings:
        say(console, str(finding))
    num_problems = sum(finding.state == "problem" for finding in findings)
    if num_problems:
        raise LaunchError(
            f"{counted(num_problems, 'problem')} of this machine",
            expected="none",
            remedy="follow the remedies above",
        )
    if command.calibrate:
        for finding in calibrate_machine(facts):
            say(console, str(finding))
