"""What kernels run on: arenas, memory that GPUs share, launches, signals, copies by copy engines.
A layout comes in; tensors, pointers and launches go out.

Start at arena.py; runners.py opens the kernel of a segment on a GPU.
"""
