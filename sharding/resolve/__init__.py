"""From divisions of ops to layouts of tensors and the collectives between them.

The search's options or a user's annotations come in; every tensor's placement and every
collective go out. Start at resolve.py; the table of collectives is in reshard.py, uneven parts
are in padding.py.
"""
