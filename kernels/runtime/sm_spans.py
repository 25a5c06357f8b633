"""Spans of what the SMs of a persistent kernel do: a process a rank, a track an SM.

In: stamps of the GPU's clock. Out: a Span, see distmega/trace_file.py. The timelines of the kernels
of rows (hopper/timeline.py) and of records (records/timeline.py) share it. Torch-free.
"""

from collections.abc import Mapping

from distmega.trace_file import Span

ROUND_NS = 2**50
"""13 days, after which spans are counted from zero again: a float of more microseconds could not
tell nanoseconds apart.
"""


def sm_span(
    rank: int, sm: int, name: str, begin_ns: int, end_ns: int, args: Mapping[str, str | int]
) -> Span:
    """From one stamp to another, in nanoseconds since whenever; args: see Span."""
    return Span(
        process=f"rank {rank}",
        track=f"SM {sm}",
        name=name,
        start_us=begin_ns % ROUND_NS / 1e3,
        duration_us=(end_ns - begin_ns) / 1e3,
        args=args,
    )
