"""The kernel of several rows: a program an SM, in step by one event an instruction.

A BatchQueues and the arenas come in; ids, the rows that a segment gives and the advanced state
go out. Start at runner.py, which launches kernel.py; loader.py fills the ring, bodies/
computes the instructions, route.py chooses experts, team.py is what ranks do together.
"""
