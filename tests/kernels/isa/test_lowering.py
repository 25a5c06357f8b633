"""Kinds that have instructions say so in their definitions."""

from distmega.kernels.isa.lowering import RULES
from distmega.kernels.isa.rules_move import COPY_KINDS
from distmega.program.kinds import kinds


def test_kinds_say_whether_a_megakernel_has_them():
    """Other rules are of what the tiler makes of ops, which is of no program."""
    defined = {kind.name for kind in kinds() if kind.origin != "internal"}
    told = {kind.name for kind in kinds() if kind.in_megakernel}
    assert told == {*RULES, *COPY_KINDS} & defined
