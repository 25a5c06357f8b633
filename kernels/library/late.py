"""Kernels of this room, which need Triton, and those of rewrite rules: imported when they are used.
See distmega/lazy.py.
"""

from typing import TYPE_CHECKING

from distmega.lazy import late_imports

if TYPE_CHECKING:
    from distmega.kernels.library.grouped_products import grouped_linear, mix_groups
    from distmega.kernels.library.heads import append, move_heads, rotate
    from distmega.kernels.library.packed_attention import attend_packed
    from distmega.kernels.library.routing import compile_gather, compile_route, compile_top_k
    from distmega.kernels.library.row_attention import attend_each
    from distmega.kernels.library.row_maxima import compile_argmax
    from distmega.kernels.library.row_steps import run_rows
    from distmega.kernels.library.short_attention import compile_attend
    from distmega.kernels.library.step_attention import attend_step
    from distmega.kernels.library.step_ends import end_step
    from distmega.kernels.library.streamed_products import compile_streamed
    from distmega.kernels.library.tiled_products import compile_product
    from distmega.kernels.library.weighted_rows import add_weighted_rows
    from distmega.kernels.ugraphs.ops import compile_graph

__all__ = [
    "add_weighted_rows",
    "append",
    "attend_each",
    "attend_packed",
    "attend_step",
    "compile_argmax",
    "compile_attend",
    "compile_gather",
    "compile_graph",
    "compile_product",
    "compile_route",
    "compile_streamed",
    "compile_top_k",
    "end_step",
    "grouped_linear",
    "mix_groups",
    "move_heads",
    "rotate",
    "run_rows",
]

__getattr__ = late_imports(__name__)
