"""Bodies of the kernel of one row: what the compute warps do for an instruction.

Fields of an instruction and tiles of the ring come in; flagged words, states and cached positions
go out to global memory. Start at linear.py, which products.py and the PTX of ../ptx/ serve;
attention.py and splits.py attend, pointwise.py has work without a product, sample.py the id.
"""
