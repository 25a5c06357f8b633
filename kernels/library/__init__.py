"""Library ops of host programs on a GPU, outside a megakernel: kernels of this room, pipelined/ and
ugraphs/, torch for the rest.

Comes in: ops as lowered. Goes out: KernelOps, which an Evaluator is given. Start at device_ops.py.
"""
