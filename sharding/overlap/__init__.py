"""Matmuls beside collectives: which pairs run together, and how.

A schedule and a Machine, whose model says what each way takes, come in; a way for each pair goes
out, the one of the least predicted time. Start at pairs.py; products.py has what is asked.
"""
