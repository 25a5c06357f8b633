"""Which kinds have instructions, and that their definitions say so."""

from distmega.kernels.isa.lowering import RULES
from distmega.kernels.isa.rules_move import COPY_KINDS
from distmega.program.kinds import kinds

ON_GPUS_ALONE = {"gather_rows", "grouped_linear", "route", "scatter_add", "top_k"}
"""Kinds that fused ops take in (kernels/tasks/fuse/) and that the interpreter has no rule for."""
OF_TASKS = {"push", "push_parts", "sum_ranks", "argmax_ranks"}
"""What collectives become between tasks: kinds of no program."""


def test_kinds_say_whether_a_megakernel_has_them():
    told = {kind.name for kind in kinds() if kind.in_megakernel}
    assert told == {*RULES, *COPY_KINDS} - OF_TASKS | ON_GPUS_ALONE
