"""An emulator of the kernels' queues on a CPU: it computes what they say and notices races.

In: queues of every rank with the arenas of weights and states, launches, a seed. Out: what a GPU
would leave, or a CheckError that names a read or write that nothing orders, or a wait that nobody
satisfies. Start at one_row/kernel.py, for several rows at batch/kernel.py; bodies of instructions
stand beside each.
"""

from distmega.kernels.hopper.emulator.batch.kernel import (
    BatchArenas,
    BatchFound,
    BatchLaunch,
    emulate_batch,
)
from distmega.kernels.hopper.emulator.one_row.kernel import (
    Found,
    RankArenas,
    RowLaunch,
    emulate_rows,
)

__all__ = [
    "BatchArenas",
    "BatchFound",
    "BatchLaunch",
    "Found",
    "RankArenas",
    "RowLaunch",
    "emulate_batch",
    "emulate_rows",
]
