"""Where the weights of a decoder come from.

A ModelConfig comes in; names, shapes and readers go out: of a file's tensors, of random values,
and of kv heads that are copied. Read tensors.py first.
"""
