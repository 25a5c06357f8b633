"""What the kernels are built of below Gluon's own words: layouts, bounded waits, text of PTX.

Values in registers and addresses of shared memory come in; values go out, or PTX that reads and
writes there behind Triton's back. Start at shapes.py and device.py, then spins.py; pieces.py,
products.py and blocks.py write the PTX that one_row/ runs.
"""
