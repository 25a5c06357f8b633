"""Makes the UGraph of a schedule: names, tensors, maps and stages.

Comes in: a Schedule, an EGraph and the program whose outputs its roots are. Goes out: a verified
UGraph. Next: equivalence.py, which asks whether it computes the same.
"""

from collections.abc import Mapping

from distmega.program.types import Program
from distmega.superopt.graph.named import Dims, dim_of
from distmega.superopt.graph.ugraph import BlockOp, GraphTensor, Kernel, Load, Store, UGraph
from distmega.superopt.graph.verify import verify_graph
from distmega.superopt.search.egraph import EGraph
from distmega.superopt.search.schedule import KernelPlan, KernelSchedule
from distmega.superopt.search.terms import input_of


def assemble(
    program: Program,
    dims: Mapping[str, Dims],
    roots: Mapping[str, int],
    graph: EGraph,
    schedule: KernelSchedule,
    types: Mapping[int, str],
) -> UGraph:
    """The graph. dims: axes of the program's tensors. roots: class of each output. types: of
    classes that are stored as the program stores them; others are f32.
    """
    return _Assembly(program, dims, roots, graph, schedule, types).build()


class _Assembly:
    """Names what is made."""

    def __init__(
        self,
        program: Program,
        dims: Mapping[str, Dims],
        roots: Mapping[str, int],
        graph: EGraph,
        schedule: KernelSchedule,
        types: Mapping[int, str],
    ) -> None:
        self._program, self._dims, self._graph, self._schedule = program, dims, graph, schedule
        self._types = types
        self._extents = dict(schedule.extents)
        taken = {tensor.name for tensor in program.tensors if tensor.role != "temp"}
        self._names = {graph.find(number): name for name, number in roots.items()}
        steps = [number for kernel in schedule.kernels for number, _ in kernel.steps]
        free = (f"v{n}" for n in range(len(steps) + len(taken) + len(roots) + 1))
        for number in steps:
            if number not in self._names:
                used = taken | set(self._names.values())
                self._names[number] = next(name for name in free if name not in used)

    def build(self) -> UGraph:
        """All kernels and tensors."""
        known = self._program.tensor_map()
        leaves = {
            self._leaf(n)[0]
            for k in self._schedule.kernels
            for n in k.loads
            if n not in self._names
        }
        tensors = [
            GraphTensor(
                name=t.name,
                dtype=t.dtype,
                dims=self._dims[t.name],
                role="weight" if t.role == "weight" else "input",
            )
            for t in self._program.tensors
            if t.name in leaves
        ]
        for kernel in self._schedule.kernels:
            for number in kernel.stores:
                name = self._names[number]
                is_output = name in self._program.outputs
                dims = self._dims[name] if is_output else tuple((a,) for a in self._order(number))
                dtype = known[name].dtype if is_output else self._types.get(number, "f32")
                tensors.append(GraphTensor(name=name, dtype=dtype, dims=dims, role="temp"))
        kernels = [self._kernel(n, k) for n, k in enumerate(self._schedule.kernels)]
        made = {op.joined for kernel in kernels for op in kernel.ops if op.joined}
        used = {a for t in tensors for a in t.axes} | {
            a for kernel in kernels for op in kernel.ops for a in (*op.axes, *op.reduced)
        }
        used |= {a for k in kernels for load in k.loads for dim in load.dims for a in dim}
        extents = tuple((a, n) for a, n in self._extents.items() if a in used - made)
        return verify_graph(
            UGraph(
                name=self._program.name,
                extents=extents,
                tensors=tuple(tensors),
                kernels=tuple(kernels),
                outputs=self._program.outputs,
            )
        )

    def _leaf(self, number: int) -> tuple[str, Dims]:
        for op, data, _ in self._graph.nodes(number):
            if op == "input":
                return input_of(data)
        raise KeyError(number)

    def _order(self, number: int) -> tuple[str, ...]:
        axes = self._graph.axes(number)
        return tuple(name for name in self._extents if name in axes)

    def _kernel(self, index: int, plan: KernelPlan) -> Kernel:
        ops = tuple(
            BlockOp(
                name=self._names[number],
                kind=choice.kind,
                args=tuple(map(self._name, choice.args)),
                axes=self._order(number),
                stage=stage,
                reduced=() if choice.kind == "map" else choice.data[:2] if choice.kind == "cat"
                else choice.data,
                expr=choice.data[0] if choice.kind == "map" else "",
                joined=choice.data[2] if choice.kind == "cat" else "",
            )
            for (number, choice), stage in zip(plan.steps, plan.stages, strict=True)
        )  # fmt: skip
        loads = tuple(self._load(plan, number) for number in plan.loads)
        stores = tuple(
            Store(name=self._names[n], omap=self._map(plan, dims), fmap=_loop_dim(plan, dims))
            for n in plan.stores
            for dims in [self._stored_dims(n)]
        )
        return Kernel(
            name=f"k{index}", grid=plan.grid, loop=plan.loop, loads=loads, ops=ops, stores=stores
        )

    def _name(self, number: int) -> str:
        """What a value is called in a block: a leaf by its tensor, and its axes if it is read in
        several ways.
        """
        if number in self._names:
            return self._names[number]
        name, dims = self._leaf(number)
        return (
            name if dims == self._dims[name] else f"{name}@{'.'.join(a for d in dims for a in d)}"
        )

    def _load(self, plan: KernelPlan, number: int) -> Load:
        if number in self._names:
            tensor, dims = self._names[number], self._stored_dims(number)
        else:
            tensor, dims = self._leaf(number)
        return Load(
            name=self._name(number),
            tensor=tensor,
            dims=dims,
            imap=self._map(plan, dims),
            fmap=_loop_dim(plan, dims),
        )

    def _stored_dims(self, number: int) -> Dims:
        name = self._names[number]
        if name in self._program.outputs:
            return self._dims[name]
        return tuple((axis,) for axis in self._order(number))

    def _map(self, plan: KernelPlan, dims: Dims) -> tuple[int, ...]:
        return tuple(dim_of(dims, axis) for axis, _ in plan.grid)


def _loop_dim(plan: KernelPlan, dims: Dims) -> int:
    return dim_of(dims, plan.loop[0]) if plan.loop else -1
