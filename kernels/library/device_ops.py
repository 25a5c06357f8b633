"""Library ops of a host program on a GPU, each by the kernel that does it:

- pointwise ops, norms and softmax: pipelined/, several of them in turn row_steps.py;
- products of few rows: tiled_products.py, streamed_products.py; experts: routing.py,
  grouped_products.py, weighted_rows.py;
- attention: packed_attention.py of prompts, row_attention.py of one row of each sequence, with what
  is done to its heads before step_attention.py, short_attention.py of short sequences without a
  cache; rotations and caches: heads.py;
- argmax: row_maxima.py; graphs of rewrite rules: ugraphs/; all else: torch.

Comes in: ops as lowered, fused ones too. Goes out: KernelOps, which an Evaluator is given. On
devices and types that the kernels don't take they fall back to torch. Next: pipelined/api.py.
"""

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from functools import cached_property, partial
from typing import Literal

import torch

from distmega.hostir.library.experts import (
    compile_grouped_linear,
    compile_grouped_mix,
    compile_grouped_pointwise,
    compile_scatter_add,
)
from distmega.hostir.library.heads import compile_heads, compile_step
from distmega.hostir.library.matmuls import compile_mixed, compile_shaped, product
from distmega.hostir.library.norms import compile_norm
from distmega.hostir.library.ops import (
    NO_TENSORS,
    attends_in_order,
    compile_masked_attention,
    compile_op,
    is_matrix_product,
    is_packed,
    number,
    reads_host,
    result_order,
)
from distmega.hostir.library.pointwise import OpFunction, compile_pointwise
from distmega.hostir.library.rows import compile_rows
from distmega.hostir.passes.fuse_attention import FUSED as FUSED_ATTENTION
from distmega.hostir.passes.fuse_heads import FUSED as FUSED_HEADS
from distmega.hostir.passes.fused_kinds import MAX_READS
from distmega.kernels.gemm.api import matmul
from distmega.kernels.library import late
from distmega.kernels.library.limits import (
    GROUP_ALIGNED,
    GROUP_DTYPES,
    PACKED_ALIGNED,
    PACKED_DIM,
    PACKED_DTYPES,
    has_tiles,
)
from distmega.kernels.pipelined.api import normalise_rows, pointwise_results
from distmega.kernels.runtime.compilations import has_triton
from distmega.program.expr import Expr
from distmega.program.kinds import FUSED_GRAPH, kind_of
from distmega.program.types import Op, Tensor, grouped_index
from distmega.superopt import late as superopt_late

PRODUCTS = ("fused_linear", "fused_product", "split_linear")
"""Kinds of products that passes make."""
Groups = Literal["torch", "auto", "static", "drained"]
"""Products of groups of rows: by torch, or by grouped_products.py with that schedule."""


class KernelOps:
    """Ops by the pipelined kernels where there is one."""

    def __init__(
        self,
        *,
        masked: bool = False,
        rules: "Callable[[], Sequence[superopt_late.RewriteRule]]" = tuple,
        groups: Groups = "auto",
        device: torch.device | None = None,
    ) -> None:
        """masked: attention reads whole caches under a mask, so that the host need not wait for
        positions and a graph can hold it; otherwise no more of a cache than is in use. rules: gives
        those by which programs were lowered, when an op of one comes. groups: how products of
        groups of rows are done. device: that of the ops, a GPU that all kernels run on unless told.
        """
        self.masked, self.groups = masked, groups
        self._has_tiles = has_triton() and (device is None or has_tiles(device))
        self._read_rules = rules

    @cached_property
    def rules(self) -> "Mapping[str, superopt_late.RewriteRule]":
        """By name."""
        return {rule.name: rule for rule in self._read_rules()}

    def reads_host(self, op: Op, tensors: Mapping[str, Tensor] = NO_TENSORS) -> str:
        """As library.reads_host; of tensors that are not known, as if the kernels took them."""
        if op.kind == "attention":
            # one row each asks nothing of the host, by its kernel or, of other tensors, by torch
            each = _is_a_row_each(op) and has_triton()
            there = each or self._attends_packed(op, tensors)
            return "" if there or (self.masked and _is_plain(op)) else reads_host(op)
        if op.kind == FUSED_ATTENTION:
            return "" if self.masked or has_triton() else reads_host(op)
        return "" if self._multiplies_groups(op, tensors) else reads_host(op)

    def _multiplies_groups(self, op: Op, tensors: Mapping[str, Tensor]) -> bool:
        """Whether the kernel of grouped_products.py does an op."""
        num_matrices = {"grouped_linear": 1, "fused_groups": 2}.get(op.kind, 0)
        grouped = self.groups != "torch" and num_matrices > 0 and self._has_tiles
        aligned = grouped and op.extents["k"] % GROUP_ALIGNED == 0
        return aligned and _share_a_type(op, 1 + num_matrices, tensors, GROUP_DTYPES)

    def _attends_packed(self, op: Op, tensors: Mapping[str, Tensor]) -> bool:
        """Whether a kernel of packed_attention.py does an attention."""
        if not self._has_tiles or not is_packed(op):
            return False
        dim = op.extents["d"]
        fits = op.extents["e"] == dim <= PACKED_DIM and dim % PACKED_ALIGNED == 0
        return fits and _share_a_type(op, 3, tensors, PACKED_DTYPES)

    def _product_by_kernel(
        self, op: Op, coordinate: Mapping[str, int], constants: Container[str]
    ) -> OpFunction | None:
        """As by_kernel, of a product: by small tiles, or streamed, where these are expected to be
        fastest.
        """
        if op.kind == "fused_linear":
            found = compile_mixed(
                op, lambda x, w, other, formula: matmul(x, w, mixes=formula, other=other)
            )
        elif op.kind == "split_linear":
            found = compile_op(op, coordinate)
        else:
            is_shaped = op.kind == "fused_product"
            found = compile_shaped(op, shaped_product) if is_shaped else compile_op(op, coordinate)
            found = late.compile_product(op, found) if self._has_tiles else found
        weights = {read.tensor for read in op.reads[1 : 2 + (op.kind == "fused_linear")]}
        known = self._has_tiles and all(name in constants for name in weights)
        return late.compile_streamed(op, found) if known else found

    def compile(
        self, op: Op, coordinate: Mapping[str, int], constants: Container[str] = ()
    ) -> OpFunction:
        """As library.compile_op."""
        found = self.by_kernel(op, coordinate, constants)
        if found is not None:
            return found
        plain = op.kind == FUSED_ATTENTION or (op.kind == "attention" and _is_plain(op))
        if self.masked and plain:
            return compile_masked_attention(op)
        return compile_op(op, coordinate)

    def by_kernel(
        self, op: Op, coordinate: Mapping[str, int], constants: Container[str] = ()
    ) -> OpFunction | None:
        """As compile, of an op that kernels of this package do; None for the others."""
        if op.kind == FUSED_GRAPH:
            return late.compile_graph(op, self.rules)
        if grouped_index(op) is not None:
            return self._groups_by_kernel(op, coordinate)
        if op.kind in ("attention", "attend"):
            return self._attention_by_kernel(op, coordinate)
        if kind_of(op).is_elementwise and len(op.reads) <= MAX_READS:
            return compile_pointwise(op, pointwise_results)
        if kind_of(op).is_norm:
            return compile_norm(op, normalise_rows)
        if op.kind == "rope" and has_triton():
            return lambda xs: (late.rotate(xs[0], xs[2], xs[3]),)
        if op.kind == "kv_append" and has_triton():
            return lambda xs: (late.append(xs[-1], *xs[:-1]),)
        if op.kind in PRODUCTS or (op.kind == "linear" and is_matrix_product(op)):
            return self._product_by_kernel(op, coordinate, constants)
        if op.kind == "fused_rows" and has_triton():
            return compile_rows(op, lambda *given: late.run_rows(*given))
        if op.kind == FUSED_HEADS and has_triton():
            return compile_heads(op, lambda *given: late.move_heads(*given))
        if op.kind == FUSED_ATTENTION and has_triton():
            factors = number(op, "scale"), int(number(op, "window")), number(op, "softcap")
            return compile_step(op, lambda given: late.attend_step(given, *factors))
        if op.kind == "argmax" and self._has_tiles:
            return late.compile_argmax(op, coordinate, compile_op(op, coordinate))
        if op.kind == "top_k" and self._has_tiles:
            return late.compile_top_k(op, compile_op(op, coordinate))
        if op.kind == "route" and self._has_tiles:
            return late.compile_route(op, compile_op(op, coordinate))
        return None

    def _groups_by_kernel(self, op: Op, coordinate: Mapping[str, int]) -> OpFunction | None:
        """As by_kernel, of an op over groups of rows."""
        if self.groups != "torch" and self._multiplies_groups(op, NO_TENSORS):
            if op.kind == "fused_groups":
                mix = partial(late.mix_groups, schedule=self.groups)
                return compile_grouped_mix(op, coordinate, mix)
            multiply = partial(late.grouped_linear, schedule=self.groups)
            return compile_grouped_linear(op, coordinate, multiply)
        if op.kind == "gather_rows" and self._has_tiles:
            return late.compile_gather(op, coordinate, compile_op(op, coordinate))
        if op.kind == "scatter_add" and self._has_tiles:
            return compile_scatter_add(
                op, coordinate, lambda *given: late.add_weighted_rows(*given)
            )
        if kind_of(op).is_elementwise and len(op.reads) <= MAX_READS + 1:  # and the offsets
            return compile_grouped_pointwise(op, coordinate, pointwise_results)
        return None

    def _attention_by_kernel(self, op: Op, coordinate: Mapping[str, int]) -> OpFunction | None:
        """As by_kernel, of an op of kind attention or attend."""
        if op.kind == "attend":
            if self._has_tiles and _is_short(op):
                return late.compile_attend(op, result_order(op), compile_op(op, coordinate))
            return None
        scale, window = number(op, "scale"), int(number(op, "window"))
        softcap = number(op, "softcap")
        if self._attends_packed(op, NO_TENSORS):
            return lambda xs: (
                late.attend_packed(
                    xs[0], xs[1], xs[2], xs[3], xs[4], xs[5], scale, window, softcap
                ),
            )
        if _is_a_row_each(op) and has_triton():
            return lambda xs: (
                late.attend_each(xs[0], xs[1], xs[2], xs[3], scale, window, softcap),
            )
        return None


def shaped_product(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, formula: Expr
) -> torch.Tensor:
    """A formula of each element of x W' + bias."""
    (found,) = pointwise_results([formula], [product(x, w, bias)])
    return found


def _share_a_type(op: Op, num: int, tensors: Mapping[str, Tensor], dtypes: Collection[str]) -> bool:
    """Whether the first operands of an op are of one of these types, as far as they are known."""
    found = {tensors[read.tensor].dtype for read in op.reads[:num] if read.tensor in tensors}
    return len(found) <= 1 and found <= {*dtypes}


def _is_a_row_each(op: Op) -> bool:
    """Whether an attention has one row of each sequence, as row_attention.py takes it."""
    cache = op.reads[1].dims
    rows, sequences = op.reads[0].dims[0].axes, cache[0].axes if len(cache) == 4 else ()
    has_one = len(cache) == 3 and op.extents[rows[0]] == 1
    return _is_plain(op) and (has_one or rows == sequences)


def _is_short(op: Op) -> bool:
    """Whether each row of an attention over keys at hand sees all of them, and elements of its
    results lie together.
    """
    return len(op.reads) == 3 and not op.get("softcap", 0) and result_order(op)[3] == 3


def _is_plain(op: Op) -> bool:
    """Whether rows of an attention are at any positions of one sequence, or of one each."""
    return not attends_in_order(op) and not op.get("packed", 0)
