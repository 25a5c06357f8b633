"""The superoptimizer: equivalent programs found, proven over finite fields, and used.

A Program comes in; rules go out, each a uGraph (kernels, blocks, loops and threads at once) that
computes the same in less time, with its proof. `optimize.py` runs it: terms.py and laws.py say what
equals the program, generate.py and schedule.py make graphs of it, equivalence.py proves them and
knows none of that, rules.py keeps them, rewrite.py uses them. Read ugraph.py first.
"""
