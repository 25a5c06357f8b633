"""Random programs of rows: the interpreter gives torch's numbers, the queues of the kernel of one
row are built and proven for most of them, and queues emulated give the interpreter's bits.
"""
