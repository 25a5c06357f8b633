"""Kernels for ops outside a megakernel: several TMA stages in flight, each consumed as it lands.

Starts at api.py, which users reach as `distmega.kernels.rms_norm` and so on; norms/ and pointwise/
have the kernels of each.
"""
