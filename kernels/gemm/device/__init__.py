"""The matmul kernel and its launch.

Matrices, or rows of A that arrive with their events, and a MatmulSpec come in; the result goes out,
here or in memory of peers. Start at start.py, which launches kernel.py; order.py says which tile is
whose, events.py waits and signals. Only spec.py needs no triton.
"""
