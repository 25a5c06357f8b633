"""The search for a plan: which iteration axis of each op is divided, at the least predicted time.

A program, a mesh and a Machine come in; one option an op goes out, with what was rejected.
cost.py says what an op and a collective cost, predict.py what a planned program does; start at
options.py, then search.py.
"""
