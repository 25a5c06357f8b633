"""From a segment of ops to tasks: tiles, regions, events, order, proof. A segment (a Program) and
a number of SMs come in; a Schedule goes out, the queue of every SM with the waits that are
needed.

Start at types.py. expand.py, groups.py and overwrites.py restate ops that tasks can't take as they
are; tile.py cuts all into tasks, follow.py some as the op before them was cut; graph.py finds who
waits for whom, by the regions of regions.py and footprints.py; schedule.py makes the queues, and
check/ proves them by other means. fuse/ is the way to the kernels of rows instead.
"""
