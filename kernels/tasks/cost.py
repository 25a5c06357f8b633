"""What a segment takes as a persistent kernel, as far as rewriting it can change that.

In: a Program that is to be one launch, and the rates of a device. Out: microseconds by a coarse
model: every fused op waits for the one before it, and reads its weights once. By it rewrite rules
are chosen (distmega/superopt/rewrite.py). Next: fuse/segment.py, whose ops are counted.
"""

import math

from distmega.errors import UnsupportedError
from distmega.kernels.tasks.fuse import FusedContraction, fuse_segment
from distmega.program.types import Program
from distmega.sharding.search.cost import DeviceRates

WAIT_US = 1.0
"""From the end of one fused op on all SMs to the start of the next."""


def segment_us(segment: Program, machine: DeviceRates) -> float:
    """Predicted time; inf for a segment with an op that no rule of fuse/segment.py takes."""
    try:
        fused = fuse_segment(segment)
    except UnsupportedError:
        return math.inf
    tensors = segment.tensor_map()
    weights = sum(
        tensors[name].num_bytes
        for op in fused
        if isinstance(op, FusedContraction)
        for stream in op.streams
        for name in stream.weights
    )
    return float(WAIT_US * len(fused) + weights / machine.memory_bandwidth_bytes_per_us)
