"""Bodies of the kernel of several rows: what the compute warps do for an instruction.

Fields of an instruction and tiles of the ring come in; activations, states and cached positions go
out to global memory, complete at the instruction's event. Start at linear.py; experts.py and
norms.py say what it takes besides, attention.py, pointwise.py, sample.py and limits.py are the
rest.
"""
