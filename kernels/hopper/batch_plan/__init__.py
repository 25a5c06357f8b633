"""Queues of the kernel of several rows.

Fused ops and the layouts of arenas come in; a BatchQueues goes out: the same instructions for every
SM, each for its own rows, as words.py lays them into device words, proven by proof.py. Start at
queues.py, which fills a BatchDraft (draft.py) op by op; linear.py, pointwise.py and choice.py have
the instructions, results.py where results lie. fields.py has the words as constants of kernels and
alone needs triton.
"""
