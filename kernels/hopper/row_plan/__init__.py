"""Queues of the kernel of one row.

Fused ops and the layouts of arenas come in; a RowQueues (../plan/types.py) goes out: the
instructions of every SM, with the flagged words that each polls and writes, proven by proof.py.
Start at queues.py, which fills a RowDraft (draft.py) op by op; linear.py, pointwise.py,
attention.py, choice.py and embedding.py have the instructions of each.
"""
