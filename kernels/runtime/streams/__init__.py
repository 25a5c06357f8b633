"""What streams do between kernels: copies by copy engines, words written and awaited, signals.

A CUDA stream and symmetric memory come in; work in the stream's order goes out, on this GPU and on
peers. Start at stream_ops.py; copy_engines.py and signals.py are what host programs use of it.
"""
