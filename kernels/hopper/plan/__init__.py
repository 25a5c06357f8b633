"""Queues of the kernel of one row, and what both kernels share of planning.

Fused ops and the layouts of arenas come in; a RowQueues goes out: the instructions of every SM, as
words.py lays them into device words, proven by proof.py. Start at queues.py; types.py says what it
returns. Only fields.py, the words as constants of kernels, needs triton.
"""
