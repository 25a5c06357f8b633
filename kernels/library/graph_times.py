"""What library ops take, one behind the other in a CUDA graph, as far as that is known.

In: a host program that is not run yet. Out: microseconds by the models of its products
(small_tiles.py), and what formulas and norms of rows took on an H200. By it a program is left to
library ops that a persistent kernel would do later (kernels/whole.py).
"""

import math
from collections.abc import Mapping

from distmega.hostir.ir.nodes import Allocate, Deallocate, HostProgram, LibraryOp, Node
from distmega.kernels.library.small_tiles import product_us
from distmega.program.kinds import kind_of
from distmega.program.types import Op, Tensor
from distmega.sharding.search.cost import DeviceRates, op_bytes

ROWS_US = 1.2
"""Of a formula or a norm of few rows, beside the bytes that it moves."""
PRODUCTS = {"linear": 1, "fused_product": 1, "fused_linear": 2}
"""Kinds of ops whose reads are x and weights, and how many of these they name."""


def library_ops_us(host: HostProgram, machine: DeviceRates) -> float:
    """Predicted time of a replay; inf where an op is neither a product nor a formula or a norm of
    rows.
    """
    tensors = host.buffer_map()
    return sum(_node_us(node, tensors, machine) for node in host.body)


def _node_us(node: Node, tensors: Mapping[str, Tensor], machine: DeviceRates) -> float:
    if isinstance(node, Allocate | Deallocate):
        return 0.0
    if not isinstance(node, LibraryOp):
        return math.inf
    op = node.op
    if op.is_view:
        return 0.0
    if op.kind in PRODUCTS:
        return _product_us(op, tensors, machine)
    if kind_of(op).is_elementwise or kind_of(op).is_norm:
        return ROWS_US + op_bytes(op, tensors) / machine.memory_bandwidth_bytes_per_us
    return math.inf


def _product_us(op: Op, tensors: Mapping[str, Tensor], machine: DeviceRates) -> float:
    num_named = PRODUCTS[op.kind]
    weights = {read.tensor for read in op.reads[1 : 1 + num_named]}
    depth = math.prod(axis.extent for axis in op.axes if axis.role == "reduce")
    columns = sum(tensors[name].num_elements for name in weights) // depth
    rows = num_named * tensors[op.writes[0].tensor].num_elements // columns
    has_formula = op.kind != "linear"
    return product_us(rows, columns, depth, machine.num_sms, has_formula=has_formula)
