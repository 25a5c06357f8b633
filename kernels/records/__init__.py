"""The records that the interpreter runs, run by a kernel on a GPU: any program that encodes.

In: a Megakernel, whose queues the CPU interpreter runs too, word by word. Out: a runner on one GPU.
It is for what the kernels of rows (hopper/) do not take and a caller wants as one launch all the
same: it reads each operand element by element, by any strides, and is slower than library ops where
there is much to multiply. Read specs.py first, then kernel.py.
"""
