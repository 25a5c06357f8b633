"""Proofs that a graph computes what a program does.

A uGraph and a Program come in; a record of the proof, or the reason of a refusal, goes out. It
knows nothing of the search. Read equivalence.py first.
"""
