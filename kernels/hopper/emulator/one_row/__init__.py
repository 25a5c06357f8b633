"""The kernel of one row on emulated GPUs, a body an instruction.

Queues and arenas of every rank come in, with launches and a seed; what a GPU would leave goes out,
or a CheckError. Start at kernel.py, whose partitions call the bodies: bodies.py has most,
attention.py, experts.py, pointwise.py and sample.py the rest.
"""
