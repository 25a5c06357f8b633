"""Happens-before: proof that streams and ranks of host programs are ordered enough.

The host programs of all ranks come in; nothing, or an error that names two nodes, goes out. Start
at check.py; orders.py makes the graph that it looks at.
"""
