"""Where things are: the device mesh, loop domains of ops, allocation domains of tensors.

Words of a user (`shard`, `replicate`, `stream`) come in; index maps on exact positions go out,
which equality.py compares. Start at domains.py.
"""
