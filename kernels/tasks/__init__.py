"""From a segment of ops to tasks: tiles, regions, events, order, proof. A segment (a Program) and
a number of SMs come in; a Schedule goes out, the queue of every SM with the waits that are
needed. fuse/ makes fused ops of a segment instead, for the kernels of hopper/.

Start at types.py, then tile.py, graph.py, schedule.py; check/ proves the result by other
means.
"""
