"""The kernel of 2 to 16 rows: a program an SM, in step by one event an instruction.

A BatchQueues and the arenas come in; tokens, the rows that a segment gives and the advanced state
go out. Start at runner.py, which launches kernel.py; loader.py fills the ring, linear.py,
attention.py, norms.py, sample.py and limits.py are the tasks, team.py is what ranks do together.
"""
