"""What a caller chooses for a compiled program, and what is refused before anything is planned.

Used by compile.py, program.py and lowering.py.
"""

from collections.abc import Sequence
from typing import Literal

from distmega.arguments import require_switch, shown
from distmega.errors import ProgramError
from distmega.sharding.planner import Plan
from distmega.superopt.rules import RewriteRule

Megakernels = Literal["auto"] | bool
"""Whether a program is one persistent kernel a rank."""


def require_plan(plan: object) -> None:
    if not isinstance(plan, Plan):
        raise ProgramError(
            f"{type(plan).__name__} in place of a plan",
            expected="what plan_program gives",
            remedy="plan the program on a mesh first",
        )


def require_choices(megakernel: object, rules: Sequence[object] | None, **switches: object) -> None:
    """ProgramError for arguments of other types than CompiledProgram takes."""
    for name, value in switches.items():
        require_switch(name, value, error=ProgramError)
    if not isinstance(megakernel, bool | str) or megakernel not in (True, False, "auto"):
        raise ProgramError(
            f"megakernel={shown(megakernel)}",
            expected='True, False or "auto"',
            remedy="leave it out for a kernel where one can do the program",
        )
    listed = rules is None or (isinstance(rules, Sequence) and not isinstance(rules, str))
    if not listed or not all(isinstance(rule, RewriteRule) for rule in rules or ()):
        raise ProgramError(
            f"rules {shown(rules)}",
            expected="a sequence of RewriteRule",
            remedy="read them with read_rules of distmega.superopt.rules",
        )
