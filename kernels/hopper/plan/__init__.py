"""What both kernels share of planning: device words, types, and what the ops of a segment agree on.

Fused ops and the layouts of arenas come in; places of weights, operands in order and agreed extents
go out to row_plan/ and batch_plan/, which make queues of them. Start at types.py; words.py lays
instructions into device words, and fields.py, the same as constants of kernels, alone needs triton.
"""
