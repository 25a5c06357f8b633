"""uGraphs: what the search makes and the proof takes.

A Program's axes or a text come in; graphs come out, printed, verified, run and priced. Read
ugraph.py first, then interpret.py, which says what a graph computes.
"""
