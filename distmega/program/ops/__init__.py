"""The op kinds: each function states one op as axes and access maps, and infers its outputs.

Operands come in as types of program/types.py, an Op goes out. compute.py has what computes,
norms.py what needs a whole row, data_movement.py what only moves data; parts.py is shared by all.
"""
