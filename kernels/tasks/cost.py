"""What a segment takes as a persistent kernel of rows.

In: a Program that is to be one launch, and the rates of a device. Out: microseconds by a coarse
model: every fused op waits for the one before it, and reads its weights once. By it rewrite rules
are chosen (distmega/superopt/rewrite.py), and whether a program is left to library ops
(kernels/whole.py). Next: fuse/segment.py, whose ops are counted.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distmega.errors import UnsupportedError
from distmega.kernels.tasks.fuse import Fused, FusedContraction, fuse_segment
from distmega.program.types import Program, Tensor
from distmega.sharding.search.cost import DeviceRates


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchTimes:
    """Of a launch, from the end of the one before it, besides its ops; of a fused op, from the end
    of the one before it on all SMs; of a norm in front of a product. reads_ahead: whether weights
    come while SMs wait, so that a product takes the longer of both times, not their sum.
    """

    start_us: float
    wait_us: float
    norm_us: float
    reads_ahead: bool


ONE_ROW = LaunchTimes(start_us=6.6, wait_us=1.2, norm_us=0.8, reads_ahead=True)
SEVERAL_ROWS = LaunchTimes(start_us=7.4, wait_us=2.4, norm_us=1.4, reads_ahead=False)
"""Measured on an H200, in chains of 2 to 12 products of 128 to 4096 columns."""


def segment_us(segment: Program, machine: DeviceRates) -> float:
    """Predicted time; inf for a segment with an op that no rule of fuse/segment.py takes."""
    try:
        return fused_us(fuse_segment(segment), segment.tensor_map(), machine)
    except UnsupportedError:
        return math.inf


def fused_us(fused: Sequence[Fused], tensors: Mapping[str, Tensor], machine: DeviceRates) -> float:
    """Predicted time of a segment's fused ops."""
    products = [op for op in fused if isinstance(op, FusedContraction)]
    is_one = all(math.prod(tensors[op.x].shape[:-1]) == 1 for op in products)
    times = ONE_ROW if is_one else SEVERAL_ROWS
    us = times.start_us + times.wait_us * (len(fused) - len(products))
    for op in products:
        weights = [tensors[name] for stream in op.streams for name in stream.weights]
        read_us = sum(x.num_bytes for x in weights) / machine.memory_bandwidth_bytes_per_us
        us += max(times.wait_us, read_us) if times.reads_ahead else times.wait_us + read_us
        us += times.norm_us * (op.norm is not None)
    return us
