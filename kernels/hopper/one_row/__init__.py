"""The kernel of one row: a program an SM, one loader warp and eight compute warps.

A RowQueues and the arenas come in; ids, the rows that a segment gives and the advanced state go
out. Start at runner.py, which launches kernel.py; loader.py fills the ring, bodies/
computes the instructions, route.py chooses experts, team.py is what ranks do together.
"""
