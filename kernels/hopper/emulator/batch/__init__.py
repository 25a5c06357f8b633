"""The kernel of several rows on emulated GPUs, a body an instruction.

Queues and arenas of every rank come in, with launches and a seed; what a GPU would leave goes out,
or a CheckError. Start at kernel.py; sm.py says what an SM has, bodies.py, experts.py and
pointwise.py what its instructions do.
"""
