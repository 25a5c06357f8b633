"""The superoptimizer: equivalent programs found, proven over finite fields, and used.

A Program comes in; rules go out, each a uGraph (kernels, blocks, loops and threads at once) that
computes the same in less time, with its proof. `optimize.py` runs it: search/ makes graphs that the
laws of algebra allow, proof/ proves them and knows none of that, rules.py keeps them, rewrite.py
uses them. Read graph/ugraph.py first.
"""
