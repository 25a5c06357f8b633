"""Matmuls of one persistent kernel that can wait for rows of A to arrive and send tiles of the
result as they finish, so that a collective runs beside the product instead of before or after it.

Starts at api.py, which users reach as `distmega.kernels.matmul` and so on; device/ is the kernel,
times/ what one takes.
"""
