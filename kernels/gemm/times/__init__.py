"""How long a matmul and a collective take in each way of running them: what planners are told of
this package's kernels.

Comes in: a Product of sharding/overlap/products.py, the rates of a machine, built-in or measured.
Goes out: predicted microseconds by way, and the kernel's tiles. Start at ways.py; nothing in here
needs torch.
"""
