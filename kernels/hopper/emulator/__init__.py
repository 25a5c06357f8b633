"""An emulator of the kernels' queues on a CPU: it computes what they say and notices races.

In: queues of every rank with the arenas of weights and states, launches, a seed. Out: what a GPU
would leave, or a CheckError that names a read or write that nothing orders, or a wait that nobody
satisfies. Start at row.py; bodies of instructions are in row_bodies.py.
"""

from distmega.kernels.hopper.emulator.row import Found, RankArenas, RowLaunch, emulate_rows

__all__ = ["Found", "RankArenas", "RowLaunch", "emulate_rows"]
