"""A captured module: its program with the weights bound, planned, and run like the module.

In: a torch module and example inputs. Out: Captured, and from it CapturedModule, which is called as
the module is. Start at `capture`; next on the walk: exported.py.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from distmega.arguments import require_switch, require_type
from distmega.compiled import CompiledProgram
from distmega.engine.ranks.communicators import left_on_failure, open_communicator
from distmega.engine.ranks.context import RankContext
from distmega.engine.ranks.own_process import OwnProcess
from distmega.errors import CaptureError, ProgramError, RankFailure, RequestError, counted
from distmega.hostir.comm.communicator import Communicator, SingleCommunicator, require_mesh
from distmega.hostir.library.opaque_graph import open_graph
from distmega.hostir.library.torch_types import (
    fits,
    hold,
    in_stated_types,
    is_dense,
    require_real_tensors,
    unhold,
)
from distmega.kernels.machines import CPU, H200
from distmega.program.types import Program
from distmega.program.types import Tensor as ProgramTensor
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import Layout
from distmega.sharding.planner import Plan, plan_program
from distmega.sharding.search.cost import Machine
from distmega.torch_import.annotations import match_annotations
from distmega.torch_import.calls import (
    PlainKey,
    Signature,
    bind_arguments,
    called_like,
    forward_signature,
    plain_key,
    positions_of,
    signature_of,
    word,
)
from distmega.torch_import.conversion import (
    Empty,
    Graph,
    Late,
    Output,
    Shared,
    apply_views,
    convert,
    overlap,
)
from distmega.torch_import.exported import EXPORTING, export_module

Modes = tuple[bool, ...]
"""Whether each part of a module is in training mode, in order."""
Key = tuple[pytree.TreeSpec, Signature, Modes]
"""What tells calls apart that have programs of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A module as a program.

    Attributes:
        graph: The program, and how its inputs and outputs follow from the module's.
        found: Weights and the first values of states at capture, by name.
        targets: Of those that are the module's own their names there.
        names: All names that the module has for these, each with that in the program.
        module: What was captured.
        signature: Shapes and types of inputs that are tensors; the others, which the program has as
            they are.
        in_spec: How torch flattens arguments.
        out_spec: How torch flattens results.
        modes: Those of the module at capture.
        dynamic: Inputs of other shapes, other numbers and other modes are captured when they first
            come.
    """

    graph: Graph
    found: Mapping[str, Tensor]
    targets: Mapping[str, str]
    names: Mapping[str, str]
    module: nn.Module
    signature: Signature
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    modes: Modes
    dynamic: bool = False

    @property
    def program(self) -> Program:
        """The tensor program: parameters are weights, buffers that change are states."""
        return self.graph.program

    @property
    def key(self) -> Key:
        """What a call has in common with the example."""
        return self.in_spec, self.signature, self.modes

    @property
    def opaque(self) -> Counter[str]:
        """Operators that torch runs, replicated over ranks, and how often each stands."""
        return self.graph.opaque

    @property
    def own(self) -> dict[str, Tensor]:
        """Parameters and buffers that are weights and states, by the names of these, as the module
        has them now.
        """
        found = {name: _tensor_of(self.module, target) for name, target in self.targets.items()}
        return {name: x for name, x in found.items() if x is not None}

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Weights and the first values of states, by name, as the module has them now. CaptureError
        for one that has another shape or type since, or is shared under other names.
        """
        tensors, now = dict(self.found), self.own
        for name, given in now.items():
            target, held = self.targets[name], hold(given.detach())
            if (held.shape, held.dtype) != (tensors[name].shape, tensors[name].dtype):
                raise CaptureError(
                    f"{target!r} of shape {tuple(given.shape)} and {given.dtype}",
                    expected=f"{tuple(tensors[name].shape)} and {tensors[name].dtype}, as captured",
                    remedy="capture the module again",
                )
            tensors[name] = held
        self._require_shared(now)
        return tensors

    def _require_shared(self, now: Mapping[str, Tensor]) -> None:
        """CaptureError unless names that shared a weight at capture do so now, or have weights of
        the same numbers; and where a state lies where another tensor does.
        """
        for alias, name in self.names.items():
            other = _tensor_of(self.module, alias)
            if name not in now or other is None or _lie_together(other, now[name]):
                continue
            if not _are_equal(other, now[name]):
                raise CaptureError(
                    f"{alias!r}, which is another tensor than {self.targets[name]!r}",
                    expected="one under both names, as captured",
                    remedy="capture the module again",
                )
        states = {tensor.name for tensor in self.program.with_role("state")}
        for name in sorted(states & now.keys()):
            for second, x in now.items():
                if second != name and _lie_together(now[name], x):
                    raise CaptureError(
                        f"{self.targets[name]!r} and {self.targets[second]!r} in the same memory",
                        expected="memory of its own for what the module overwrites, as captured",
                        remedy="capture the module again",
                    )

    def plan(
        self,
        mesh: DeviceMesh | None = None,
        machine: Machine = CPU,
        annotations: Mapping[str, Layout] | None = None,
        memory_limit_bytes: int | None = None,
    ) -> Plan:
        """As plan_program; annotations by patterns of parameter or module names. By default for
        one rank, by the cost model of a CPU; `compile` takes that of an H200 for GPUs. PlanError
        as plan_program, and for a pattern that names nothing.
        """
        return plan_program(
            self.program,
            DeviceMesh(tp=1) if mesh is None else mesh,
            machine,
            match_annotations(self.program, {} if annotations is None else annotations, self.names),
            memory_limit_bytes,
        )

    def compile(
        self,
        context: RankContext | None = None,
        mesh: DeviceMesh | None = None,
        annotations: Mapping[str, Layout] | None = None,
    ) -> "CapturedModule":
        """This rank's part of the module, which runs as the module does. context: the rank's place
        in a job, by default alone on the CPU. mesh: all ranks of the job, by default one. All ranks
        call it together.

        MeshError for a mesh of other ranks than the job's, PlanError as plan, CaptureError for
        weights without values.
        """
        mesh = DeviceMesh(tp=1) if mesh is None else mesh
        require_mesh(mesh)
        layouts = {} if annotations is None else annotations
        if context is None:
            return CapturedModule(self, SingleCommunicator(mesh), mesh, "cpu", layouts)
        with left_on_failure(open_communicator(context, mesh)) as comm:
            return CapturedModule(self, comm, mesh, context.device, layouts)


class CapturedModule(OwnProcess):
    """A captured module on one rank. All ranks of the mesh make the same calls in the same order.

    Inputs and results are whole on every rank. Weights are the tensors that the module had when it
    was compiled: what changes them in place is seen by the next call (through `.data` only where a
    program reads the module's memory), tensors in their place are not. States live here from call
    to call; the module's own buffers stay as they are.
    """

    how_to_remake = "capture the module and compile it in the other process"

    def __init__(
        self,
        captured: Captured,
        comm: Communicator,
        mesh: DeviceMesh,
        device: str,
        annotations: Mapping[str, Layout],
    ) -> None:
        """comm: `close` closes it too."""
        self.captured, self._comm, self._mesh = captured, comm, mesh
        self._device = device
        _require_values(captured.tensors)
        machine = H200 if torch.device(device).type == "cuda" else CPU
        self.plan = captured.plan(mesh, machine, annotations)
        self._persistent: dict[str, Tensor] = {}
        self._layouts: dict[str, Layout] = {}
        self._states: set[str] = set()
        self._sources: dict[str, Tensor] = {}
        """The module's own tensors, of weights and first values of states."""
        self._versions: dict[str, int] = {}
        """Of those that programs hold copies of: how often each had been changed then."""
        self._forward = forward_signature(captured.module)
        self._parts = tuple(captured.module.modules())
        self._is_closed = False
        self._last = self._open(captured, self.plan)
        self._steps: dict[Key, _CapturedStep] = {captured.key: self._last}
        self._plain: dict[tuple[PlainKey, Modes], tuple[_CapturedStep, tuple[int, ...]]] = {}
        """For calls with tensors alone that came before: the program, and which argument each of
        its inputs is."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module gives; results that are views of inputs are so here. Arguments come by
        place or by name, or are left out, as in a call of the module; ArgumentsError where the
        signature of its forward does not take them. CaptureError for inputs that don't fit those it
        was captured with, other numbers and keys in another order among them, and for one that the
        module overwrites while another lies in the same memory.
        """
        if self._is_closed:
            raise ProgramError(
                f"a call of a captured {type(self.captured.module).__name__} after its close()",
                expected="calls before",
                remedy="compile it again, on all ranks",
            )
        step, flat = self._find(args, kwargs)
        self._turn_to(step)
        self._follow_module()
        graph = step.captured.graph
        given = {name: x for name, x in zip(graph.inputs, flat, strict=True) if name is not None}
        _require_apart(given, graph.updated.values())
        try:
            held = {name: hold(x) for name, x in given.items()}
            parts = step.parts(held)
        except Exception:
            require_real_tensors()  # tells more than what torch says of fake ones
            raise
        try:
            out = step.compiled(parts)
        except RequestError:
            self._keep_states(step)
            raise
        late = step.end({**step.wholes, **held, **out})
        for result, name in graph.updated.items():
            given[name].copy_(unhold(out[result], given[name].dtype))
        whole = {x.name: _whole(x, out) for x in graph.outputs if isinstance(x, Output)}
        leaves = [
            late[x.position] if isinstance(x, Late) else self._result(x, whole, flat, step.tensors)
            for x in graph.outputs
        ]
        spec = step.captured.out_spec
        return leaves[0] if spec.is_leaf() else pytree.tree_unflatten(leaves, spec)

    def close(self) -> None:
        """Releases its programs, weights, states and communicator: CompiledProgram.close() of each.
        All ranks call it together; later calls raise ProgramError.
        """
        if self._is_closed:
            return
        for step in self._steps.values():
            step.compiled.close()
        self._is_closed = True
        self._plain.clear()
        for held in (self._persistent, self._sources, self._versions):
            held.clear()
        self._comm.close()

    def explain(self) -> str:
        """What was chosen for inputs of each combination of shapes that came so far, and how it
        runs: CompiledProgram.explain() of each.
        """
        return "\n".join(step.compiled.explain() for step in self._steps.values())

    def state(self, name: str) -> Tensor:
        """This rank's part of a state; KeyError is a bug of the caller."""
        return self._persistent[name]

    def _result(
        self,
        leaf: object,
        whole: Mapping[str, Tensor],
        flat: Sequence[Any],
        tensors: Mapping[str, Tensor],
    ) -> object:
        """One of the module's flat results. whole: outputs by name, in their own types; tensors:
        as of _CapturedStep.
        """
        match leaf:
            case Output(name=name, is_number=True):
                return whole[name].item()
            case Output(name=name, views=views):
                return apply_views(whole[name], views)
            case Shared(source=int(position), views=views):
                return apply_views(flat[position], views)
            case Shared(source=str(name), views=views):
                return apply_views(tensors[name].to(self._device), views)
            case Empty(shape=shape, dtype=dtype, on_meta=on_meta):
                return torch.empty(shape, dtype=dtype, device="meta" if on_meta else self._device)
        return leaf

    def _keep_states(self, step: "_CapturedStep") -> None:
        """States stay as inputs that a run refuses left them, as a module's buffers do."""
        states = [tensor.name for tensor in step.captured.program.with_role("state")]
        if states:
            step.compiled.bind({name: self._persistent[name] for name in states})

    def _find(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> "tuple[_CapturedStep, Sequence[Any]]":
        """The program for a call, and its flat inputs."""
        modes = _modes_of(self._parts) if self.captured.dynamic else self.captured.modes
        plain = plain_key(args, kwargs)
        if plain is not None and (found := self._plain.get((plain, modes))):
            step, positions = found
            values = (*args, *kwargs.values())
            return step, [values[position] for position in positions]
        bound = bind_arguments(self._forward, args, kwargs)
        flat, spec = pytree.tree_flatten(bound)
        step = self._step(flat, spec, modes, *bound)
        if plain is not None and (order := positions_of(flat, args, kwargs)) is not None:
            self._plain[plain, modes] = step, order
        return step, flat

    def _step(
        self,
        flat: Sequence[Any],
        spec: pytree.TreeSpec,
        modes: Modes,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> "_CapturedStep":
        """The program for inputs of these shapes, and the module's modes; captured anew for others,
        if that is allowed.
        """
        key = spec, signature_of(flat), modes
        if key in self._steps:
            return self._steps[key]
        if not self.captured.dynamic:
            raise CaptureError(
                f"inputs {called_like([*map(word, flat)], spec)}",
                expected="inputs like those at capture: "
                + called_like(_wanted(self.captured), self.captured.in_spec),
                remedy="capture with dynamic=True, or give tensors of these shapes and types, and "
                "all else as it was, keys in their order",
            )
        captured = capture(self.captured.module, args, kwargs, dynamic=True)
        layouts = {n: layout for n, layout in self._layouts.items() if n in captured.tensors}
        plan = plan_program(captured.program, self._mesh, self.plan.machine, layouts)
        self._steps[key] = self._open(captured, plan)
        return self._steps[key]

    def _turn_to(self, step: "_CapturedStep") -> None:
        """Before a program runs behind another one: it reads what that one changed."""
        if step is not self._last:
            weights = {tensor.name for tensor in step.captured.program.with_role("weight")}
            if changed := sorted(weights & self._states):
                step.compiled.bind({name: self._persistent[name] for name in changed})
            self._last = step

    def _follow_module(self) -> None:
        """Brings copies of weights up to what was changed in the module since."""
        sources = self._sources
        changed = [n for n, version in self._versions.items() if sources[n]._version != version]
        for name in changed:
            for step in self._steps.values():
                if name in step.tensors and name not in self._states:
                    step.load(name, hold(sources[name]))
            self._versions[name] = sources[name]._version  # a load may write where it read

    def _note_copies(self, captured: Captured, compiled: CompiledProgram) -> None:
        """Notes the weights that a program does not read where the module has them."""
        bound = compiled.tensors
        for name, given in captured.own.items():
            source = self._sources.setdefault(name, given.detach())
            has_trace = name not in self._states and not source.is_inference()
            if has_trace and not _lie_in_one(source, bound[name]):
                self._versions.setdefault(name, source._version)

    def _open(self, captured: Captured, plan: Plan) -> "_CapturedStep":
        """A program ready to run, on the weights and states that are there already."""
        compiled = CompiledProgram(plan, self._comm, self._device)
        constants: dict[str, Tensor] = {}
        tensors = captured.tensors
        self._layouts = {**plan.persistent_layouts(), **self._layouts}
        for tensor in captured.program.with_role("state"):
            if tensor.name in self._persistent and tensor.name not in self._states:
                # a weight so far, as a running mean is in evaluation mode: the module's own memory
                self._persistent[tensor.name] = self._persistent[tensor.name].clone()
            self._states.add(tensor.name)
        for name, whole in tensors.items():
            owner = constants if name in captured.graph.constants else self._persistent
            if name not in owner:
                owner[name] = _part(compiled, name, whole)
        owners = {**self._persistent, **constants}
        compiled.bind({name: owners[name] for name in tensors})
        self._note_copies(captured, compiled)
        end = captured.graph.ending
        return _CapturedStep(
            captured=captured,
            tensors=tensors,
            compiled=compiled,
            whole_inputs=_whole_inputs(compiled),
            wholes={
                name: tensors[name].to(self._device)
                for name in (end.operands if end else ())
                if name in tensors
            },
            ending=open_graph(end.call) if end else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _CapturedStep:
    """A program for inputs of some shapes, its weights, states and constants bound, and what runs
    behind it on whole tensors. tensors: whole weights as they were then; whole_inputs: inputs of
    the program that this rank has whole.
    """

    captured: Captured
    tensors: Mapping[str, Tensor]
    compiled: CompiledProgram
    whole_inputs: Mapping[str, ProgramTensor]
    wholes: dict[str, Tensor]
    ending: Callable[[Sequence[Tensor]], list[Any]] | None

    def parts(self, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's parts of inputs. One that the rank has whole is passed on where it lies: the
        program copies it, if it has to.
        """
        compiled, wholes, parts = self.compiled, self.whole_inputs, dict[str, Tensor]()
        for name, x in held.items():
            whole = wholes.get(name)
            is_part = whole is not None and fits(x, whole) and x.device == compiled.device
            is_part = is_part and x.is_contiguous()
            parts[name] = x.detach() if is_part else compiled.part(name, x)
        return parts

    def load(self, name: str, whole: Tensor) -> None:
        """Takes the values that a weight has now."""
        self.compiled.load({name: whole})
        if name in self.wholes:
            self.wholes[name] = whole.to(self.compiled.device)

    def end(self, tensors: Mapping[str, Tensor]) -> list[Any]:
        """Results that have no shape before they are there. RankFailure where torch has none."""
        end = self.captured.graph.ending
        if end is None or self.ending is None:
            return []
        try:
            with in_stated_types():
                return self.ending([tensors[name] for name in end.operands])
        except Exception as error:  # of torch, as it likes
            raise RankFailure(
                f"results of {self.captured.program.name!r} whose shapes data decide:"
                f" {type(error).__name__}: {error}",
                expected="values that torch takes",
                remedy="check the inputs",
            ) from error


def _whole_inputs(compiled: CompiledProgram) -> dict[str, ProgramTensor]:
    """Inputs of which this rank's part is the whole tensor."""
    buffers = compiled.host.buffer_map()
    return {
        tensor.name: tensor
        for tensor in compiled.plan.program.with_role("input")
        if buffers[tensor.name].shape == tensor.shape
        and compiled.slices(tensor.name) == tuple(slice(0, extent) for extent in tensor.shape)
    }


def _whole(leaf: Output, out: Mapping[str, Tensor]) -> Tensor:
    """An output of the program in its own type, which results may be views of."""
    return unhold(out[leaf.name], _torch_type(leaf.dtype)) if leaf.dtype else out[leaf.name]


def _part(compiled: CompiledProgram, name: str, whole: Tensor) -> Tensor:
    """This rank's part: a state in storage of its own, a weight where the module has it if that
    can be.
    """
    if compiled.plan.program.tensor_map()[name].role == "weight":
        try:
            return compiled.part(name, whole, copy=False)
        except ProgramError:
            pass
    return compiled.part(name, whole)


def capture(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic: bool = False,
) -> Captured:
    """The program that a module runs on inputs of these shapes, its weights bound.

    args, kwargs: example inputs; their values do not matter. Parameters become weights, buffers
    that forward updates become states, operators of torch that programs do not state stay opaque.
    Numbers, texts and other inputs that are no tensors are part of the program, defaults of those
    that are left out among them.
    dynamic: a CapturedModule takes other arguments, inputs of other shapes and other numbers too,
    each captured when first seen, and again where the module is in another mode then.
    The module runs as it is at capture, in training or evaluation mode; with dynamic as it is at a
    call. ArgumentsError for inputs that its forward does not take. CaptureError says what
    torch.export refused, what programs can't hold, and which inputs lie in the same memory where
    the module overwrites one of them.
    """
    if not isinstance(args, tuple | list):
        raise CaptureError(
            f"example inputs {word(args)}",
            expected="a tuple of the module's arguments",
            remedy="write capture(module, (x,))",
        )
    if kwargs is not None:
        expected = "the module's arguments by name"
        require_type("kwargs", kwargs, Mapping, expected, "give a dict", error=CaptureError)
    require_switch("dynamic", dynamic, error=CaptureError)
    require_real_tensors()
    args, kwargs = bind_arguments(forward_signature(module), args, kwargs or {})
    args, kwargs = _set_apart(module, args, kwargs)
    try:
        exported = export_module(module, args, kwargs)
    except CaptureError:
        _require_inputs_apart(module, args, kwargs)
        raise
    graph = convert(exported, type(module).__name__)
    stored = {**exported.constants, **exported.state_dict}
    found = {name: hold(stored[target].detach()) for name, target in graph.targets.items()}
    own = {
        name: target
        for name, target in graph.targets.items()
        if _tensor_of(module, target) is stored[target]
    }
    owners = {id(stored[target]): name for name, target in own.items()}
    flat, in_spec = pytree.tree_flatten((args, kwargs))
    return Captured(
        graph=graph,
        found={**found, **graph.constants},
        targets=own,
        names={alias: owners[id(x)] for alias, x in _all_tensors(module) if id(x) in owners},
        module=module,
        signature=signature_of(flat),
        in_spec=in_spec,
        out_spec=exported.call_spec.out_spec,
        modes=_modes_of(module.modules()),
        dynamic=dynamic,
    )


def _set_apart(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Example inputs, each a tensor of its own: torch.export takes one that is there twice for one
    input, and a parameter for no input, whatever calls give in its place.
    """
    seen = {id(x) for _, x in _all_tensors(module)} if isinstance(module, nn.Module) else set()

    def own(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if id(x) in seen:
            x = x.detach().requires_grad_(x.requires_grad)
        seen.add(id(x))
        return x

    found: tuple[Sequence[Any], Mapping[str, Any]] = pytree.tree_map(own, (args, kwargs))
    return found


def _modes_of(parts: Iterable[nn.Module]) -> Modes:
    return tuple([part.training for part in parts])


def _require_inputs_apart(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """As _require_apart, of a module that torch.export refused: what it overwrites is seen where
    each input has memory of its own.
    """
    given = tuple(args), dict(kwargs)
    flat = pytree.tree_leaves(given)
    tensors = (x for x in flat if isinstance(x, Tensor))
    if not overlap(x for x in tensors if x.is_meta or is_dense(x)):
        return
    own = pytree.tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, given)
    try:
        graph = convert(export_module(module, *own), type(module).__name__)
    except CaptureError:
        return
    inputs = {name: x for name, x in zip(graph.inputs, flat, strict=True) if name is not None}
    _require_apart(inputs, graph.updated.values())


def _require_apart(given: Mapping[str, Tensor], updated: Collection[str]) -> None:
    """CaptureError where an input that is overwritten lies where another one does."""
    for name in updated:
        for other, x in given.items():
            if other != name and overlap((given[name], x)):
                raise CaptureError(
                    f"inputs {name} and {other} in the same memory",
                    expected=f"memory of its own for {name}, which the module overwrites",
                    remedy=f"give a copy: {name}.clone()",
                )


def _tensor_of(module: nn.Module, target: str) -> Tensor | None:
    """A parameter or buffer of a module by its name there; None if it has none. While another
    thread exports the module, it has torch's stand-ins.
    """
    path, _, name = target.rpartition(".")
    try:
        with EXPORTING:
            found = getattr(module.get_submodule(path), name)
    except AttributeError:
        return None
    return found if isinstance(found, Tensor) else None


def _all_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers of a module under all names that it has for them."""
    with EXPORTING:
        return [
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ]


def _lie_together(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are one, or the same view of one memory."""
    if x is y:
        return True
    seen_so = (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())
    return seen_so and bool(x.numel()) and not x.is_meta and x.data_ptr() == y.data_ptr()


def _lie_in_one(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors lie in one memory, so that changes of one are seen in the other."""
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


def _are_equal(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have the same numbers; those without values have."""
    if (x.shape, x.dtype, x.device) != (y.shape, y.dtype, y.device):
        return False
    return x.is_meta or torch.equal(hold(x.detach()), hold(y.detach()))


def _require_values(tensors: Mapping[str, Tensor]) -> None:
    """CaptureError for weights and states that have none."""
    if bare := [name for name, x in tensors.items() if x.is_meta]:
        raise CaptureError(
            f"{counted(len(bare), 'weight')} on the meta device: {', '.join(bare[:3])}",
            expected="weights that have values",
            remedy="give them some before compiling: to_empty(device=...), then load_state_dict()",
        )


def _torch_type(name: str) -> torch.dtype:
    """An element type by torch's own name of it."""
    dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return dtype


def _wanted(captured: Captured) -> list[str]:
    """The arguments at capture, one a leaf of their tree."""
    named = captured.program.tensor_map()
    words = []
    for name, (kind, text) in zip(captured.graph.inputs, captured.signature, strict=True):
        if name is not None:
            words.append(f"{name} {named[name].dtype}{list(named[name].shape)}")
        elif isinstance(kind, tuple):  # a tensor that nothing is read of
            words.append(f"{str(text).removeprefix('torch.')}{list(kind)}")
        else:
            words.append(str(text))
    return words
