"""What a rank's program takes if every op were a library call, by the cost model.

Comes in: a local program. Goes out: microseconds. Used by decode_plan.py to choose among programs,
and by cli/explain.py.
"""

from distmega.program.ops.compute import COLLECTIVES
from distmega.program.types import Program, accesses
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.search.cost import Machine, collective_time_us, op_time_us


def predict_us(program: Program, mesh: DeviceMesh, machine: Machine) -> float:
    """Sum of the cost model's times of one rank's ops and collectives, one after another."""
    tensors = program.tensor_map()
    total = 0.0
    for op in program.ops:
        if op.kind in COLLECTIVES:
            axis = str(op.attr("mesh_axis"))
            larger = max(accesses(op), key=lambda a: tensors[a.tensor].num_bytes)
            num_bytes = tensors[larger.tensor].num_bytes
            total += collective_time_us(op.kind, num_bytes, mesh.size(axis), machine)
        else:
            total += op_time_us(op, tensors, machine)
    return total
