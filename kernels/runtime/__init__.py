"""What kernels run on: arenas, memory that GPUs share, launches. A layout comes in; tensors,
pointers and launches go out.

Start at arena.py; streams/ has what happens between kernels, ../runners.py opens the kernel of a
segment on a GPU.
"""
