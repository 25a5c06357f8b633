"""Library ops: what each op kind computes, by torch.

An op and tensors come in, results go out; these are the oracle of every kernel too. Start at
ops.py.
"""
