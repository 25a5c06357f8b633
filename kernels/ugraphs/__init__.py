"""uGraphs as GPU kernels: each kernel of a graph becomes one Triton kernel of the same blocks.

In: a UGraph that distmega/superopt found and proved. Out: a GraphRunner, called with tensors.
geometry.py chooses grids and loops for a GPU; source.py writes the kernels, with block_ops.py and
accumulators.py; runner.py launches them. Start at source.py.
"""
