"""The records that the interpreter runs, run by a kernel on a GPU: any program that encodes.

In: a Megakernel, whose queues the CPU interpreter runs too, word by word. Out: a runner on one GPU.
It is for what the kernels of rows (hopper/) do not take and a caller wants as one launch all the
same: products of many rows and half types by tiles of tensor cores, all else element by element, by
any strides, slower than library ops. Read specs.py first, then kernel.py.
"""
