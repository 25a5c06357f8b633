"""Matmuls beside collectives: which pairs run together, and how.

A schedule and the measured rates of a machine come in; a way for each pair goes out, the one of
the least predicted time. Start at pairs.py, which matmul_ways.py and cost.py serve.
"""
