"""What a rank's program takes if every op were a library call, by the cost model.

Comes in: a local program. Goes out: microseconds. Used by decode_planner.py to choose among
programs, and by the command explain. Next on the walk: cost.py.
"""

from collections.abc import Mapping

from distmega.program.kinds import kind_of
from distmega.program.types import Op, Program, Tensor, accesses
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.search.cost import Machine, collective_time_us, op_time_us


def predict_us(program: Program, mesh: DeviceMesh, machine: Machine) -> float:
    """Sum of the cost model's times of one rank's ops and collectives, one after another."""
    tensors = program.tensor_map()
    total = 0.0
    for op in program.ops:
        total += local_op_us(op, tensors, mesh, machine)
    return total


def local_op_us(op: Op, tensors: Mapping[str, Tensor], mesh: DeviceMesh, machine: Machine) -> float:
    """The cost model's time of an op or collective of one rank's program."""
    if kind_of(op).origin != "sharding":
        return op_time_us(op, tensors, machine)
    num_bytes = max(tensors[access.tensor].num_bytes for access in accesses(op))
    return collective_time_us(op.kind, num_bytes, mesh.size(str(op.attr("mesh_axis"))), machine)
