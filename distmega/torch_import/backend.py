"""torch.compile(model, backend="distmega"): graphs of dynamo as programs.

Comes in: a graph module and example inputs from dynamo, which keeps the guards and asks again for
what they don't cover. Goes out: a callable on the same inputs. Found by torch through the entry
point group torch_dynamo_backends; options={"mesh": DeviceMesh(tp=2), "annotations": {...}} under
torchrun. Next on the walk: captured.py.
"""

import logging
import os
import re
import threading
from ast import literal_eval
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._guards import TracingContext

from distmega.arguments import require_type, shown
from distmega.engine.ranks.context import RankContext
from distmega.errors import CaptureError
from distmega.hostir.comm.communicator import require_mesh
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.torch_import.captured import CapturedModule, capture
from distmega.torch_import.conversion import numbered, overlap
from distmega.torch_import.graph_numbers import GraphNumbers, NumberForm

logger = logging.getLogger(__name__)

OPTIONS = ("mesh", "annotations")
"""What torch.compile's options may hold."""

STEP = re.compile(
    r"""_(?P<of>modules|parameters)\[(?P<key>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")\]"""
)
"""A step to a parameter in the expressions by which dynamo finds it: ._modules['up_proj']."""


def compile_graph(
    graph: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., tuple[Any, ...]]:
    """The graph as a program on this rank. options: mesh, of all ranks of the job (by default one
    rank), and annotations by patterns of parameter names.

    Each combination of input shapes is captured when it first comes, and again where parameters
    lie elsewhere then; so is each number whose value the graph asks for. Programs are kept up
    to the limits of dynamo: recompile_limit that differ in numbers alone, and
    accumulated_recompile_limit in all; what was not called for longest goes. Left to torch are
    graphs that overwrite a parameter, and calls with inputs or parameters in the same memory of
    which the graph overwrites one. CaptureError for other options, a mode, which is for torch's own
    compiler, a mesh without a process group, and gradients.
    """
    if mode is not None:
        raise CaptureError(
            f"mode {shown(mode)} of torch.compile",
            expected="none: modes are of torch's own compiler",
            remedy="leave it out",
        )
    if options is not None:
        expected = "mesh and annotations by name"
        require_type("options", options, Mapping, expected, "give a dict", error=CaptureError)
    given = {} if options is None else dict(options)
    if unknown := [name for name in given if name not in OPTIONS]:
        raise CaptureError(
            f"option {shown(unknown[0])} of torch.compile",
            expected=f"one of {', '.join(OPTIONS)}",
            remedy="leave it out",
        )
    mesh = given.get("mesh", DeviceMesh(tp=1))
    require_mesh(mesh)
    return _Compiled(graph, mesh, given.get("annotations", {}))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A compiled module, and the addresses of the parameters that it was given. has_states: it
    overwrites parameters; updates: it overwrites inputs.
    """

    module: CapturedModule
    addresses: tuple[int, ...]
    has_states: bool
    updates: bool


_Shapes = tuple[tuple[torch.Size, torch.dtype], ...]
_Key = tuple[frozenset[int], _Shapes, tuple[str, ...]]
"""What has a program of its own: the inputs that are bound numbers, shapes and types of tensors,
and other inputs as they print.
"""


class _Compiled:
    """Takes the inputs of dynamo's graph: tensors, parameters among them, and sizes."""

    def __init__(
        self, graph: fx.GraphModule, mesh: DeviceMesh, annotations: Mapping[str, Any]
    ) -> None:
        self._mesh, self._annotations = mesh, annotations
        paths = _Paths()
        given = [node for node in graph.graph.nodes if node.op == "placeholder"]
        sources = [getattr(node, "_dynamo_source", None) for node in given]
        pairs = zip(sources, given, strict=True)
        self._names = [paths.add(_path(source) or node.name) for source, node in pairs]
        named = dict(zip(map(_text, sources), self._names, strict=True))
        self._aliases = {
            paths.add(alias): named[text]
            for alias, text in _aliases().items()
            if text in named and paths.is_free(alias)
        }
        self._records = _records_gradients(graph)
        self._numbers = GraphNumbers(graph)
        self._parameters: Sequence[int] = ()
        """Positions of parameters among the inputs, and of all others: what dynamo guards."""
        self._others: Sequence[int] = ()
        self._entries: dict[_Key, _Entry] = {}
        """What was called last stands last."""
        self._lock = threading.Lock()
        """Of these."""
        self._has_warned = False

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        if self._records and torch.is_grad_enabled():
            raise CaptureError(
                "a call that records gradients",
                expected="inference",
                remedy="call the compiled model under torch.no_grad()",
            )
        form = self._numbers.form  # another thread may set it meanwhile
        given_by_dynamo, args = args, form.inputs(args)
        if not self._entries:
            positions = range(len(args))
            self._parameters = [at for at in positions if isinstance(args[at], nn.Parameter)]
            self._others = [at for at in positions if not isinstance(args[at], nn.Parameter)]
        others = [args[at] for at in self._others]
        given = _tensors(others)
        key = (
            form.bound,
            tuple([(x.shape, x.dtype) for x in given]),
            tuple([repr(x) for x in others if not isinstance(x, Tensor)]),
        )
        addresses = tuple(map(Tensor.data_ptr, [args[at] for at in self._parameters]))
        entry = self._found(key)
        if entry is None or entry.addresses != addresses:
            if self._numbers.free(form, given_by_dynamo):
                return self(*given_by_dynamo)
            try:
                entry = self._open(form, args, given, addresses)
            except CaptureError:  # maybe since it asks for a number
                if not self._numbers.bind(form, given_by_dynamo):
                    raise
                return self(*given_by_dynamo)
            self._keep(key, entry)
        if entry.has_states or (entry.updates and overlap(_tensors(args))):
            found: tuple[Any, ...] = form.graph(*args)
            return found
        results: tuple[Any, ...] = entry.module(*given)
        return results

    def _found(self, key: _Key) -> _Entry | None:
        with self._lock:
            entry = self._entries.pop(key, None)
            if entry is not None:
                self._entries[key] = entry
            return entry

    def _keep(self, key: _Key, entry: _Entry) -> None:
        """Keeps a program, in place of the one of its key, and others up to dynamo's limits."""
        config = torch._dynamo.config
        with self._lock:
            before = self._entries.pop(key, None)
            other = [each for each in self._entries if each[0] != key[0]]  # no call finds these
            gone = [self._entries.pop(each) for each in other]
            same = [each for each in self._entries if each[1] == key[1]]
            past = same[: max(0, len(same) + 1 - config.recompile_limit)]
            rest = [each for each in self._entries if each not in past]
            past += rest[: max(0, len(rest) + 1 - config.accumulated_recompile_limit)]
            gone += [self._entries.pop(each) for each in past]
            self._entries[key] = entry
            warns = bool(past) and not self._has_warned
            self._has_warned |= warns
        if warns:
            logger.warning(
                "more than %d programs of one graph differ in numbers, or there are more than %d: "
                "what was not called for longest is dropped, and captured again when it comes; "
                "give numbers as tensors, or raise recompile_limit and "
                "accumulated_recompile_limit of torch._dynamo.config",
                config.recompile_limit,
                config.accumulated_recompile_limit,
            )
        if self._mesh.num_ranks > 1:  # alone, another thread may be in a call of one
            for each in (*([before] if before else []), *gone):
                each.module.close()

    def _open(
        self,
        form: NumberForm,
        args: Sequence[Any],
        given: Sequence[Tensor],
        addresses: tuple[int, ...],
    ) -> _Entry:
        module = self._compile(form, args, given)
        self._numbers.note_captured(form)
        graph = module.captured.graph
        has_states = bool(graph.program.with_role("state"))
        return _Entry(
            module=module,
            addresses=addresses,
            has_states=has_states,
            updates=bool(graph.updated),
        )

    def _compile(
        self, form: NumberForm, args: Sequence[Any], given: Sequence[Tensor]
    ) -> CapturedModule:
        """The program for inputs of these shapes; parameters and sizes are bound to it. given:
        tensors that come with each call.
        """
        bound = _Bound(form.graph, self._names, args, self._aliases)
        tensors = tuple(x.detach() for x in given)
        if overlap(_tensors(args)):  # torch.export would join what an update reaches
            tensors = tuple(x.clone() for x in tensors)
        captured = capture(bound, tensors)
        device = next((x.device for x in args if isinstance(x, Tensor)), torch.device("cpu"))
        return captured.compile(_context(device, self._mesh), self._mesh, self._annotations)


class _Bound(nn.Module):
    """A graph with its parameters, under all names that the model has for them, and sizes in
    place.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        names: Sequence[str],
        args: Sequence[Any],
        aliases: Mapping[str, str],
    ) -> None:
        super().__init__()
        self._graph = graph.forward
        self._arguments: list[object] = []
        for name, value in zip(names, args, strict=True):
            if isinstance(value, nn.Parameter):
                _attach(self, name.split("."), value)
            self._arguments.append(_Named(name) if isinstance(value, nn.Parameter) else value)
        own = dict(self.named_parameters())
        for alias, name in aliases.items():
            if name in own:
                _attach(self, alias.split("."), own[name])

    def forward(self, *tensors: Tensor) -> Any:
        left = iter(tensors)
        return self._graph(*(self._filled(each, left) for each in self._arguments))

    def _filled(self, value: object, left: Iterator[Tensor]) -> object:
        """What stands in a place: a parameter is the one that the module has now."""
        if isinstance(value, _Named):
            return self.get_parameter(value.name)
        return next(left) if isinstance(value, Tensor) else value


@dataclass(frozen=True, slots=True)
class _Named:
    """The place of a parameter."""

    name: str


class _Paths:
    """Names of parameters within one module, where none is a part of another's: dynamo's graphs may
    read several modules, whose parameters have the same names.
    """

    def __init__(self) -> None:
        self._names = {"_graph", "_arguments", "_filled"}  # attributes of _Bound
        self._modules: set[str] = set()

    def is_free(self, name: str) -> bool:
        """Whether no other has the name, or one of a module that it belongs to."""
        is_new = name not in self._names and name not in self._modules
        return is_new and self._names.isdisjoint(_modules(name))

    def add(self, name: str) -> str:
        """The name, its first part numbered unless it is free."""
        first, dot, rest = name.partition(".")
        first = numbered(first, lambda each: not self.is_free(f"{each}{dot}{rest}"))
        found = f"{first}{dot}{rest}"
        self._names.add(found)
        self._modules |= _modules(found)
        return found


def _modules(name: str) -> set[str]:
    """The modules that a parameter belongs to, by its name."""
    parts = name.split(".")
    return {".".join(parts[:num]) for num in range(1, len(parts))}


def _attach(module: nn.Module, path: Sequence[str], parameter: nn.Parameter) -> None:
    """Makes it the parameter of that path."""
    for part in path[:-1]:
        if part not in dict(module.named_children()):
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(path[-1], parameter)


def _records_gradients(graph: fx.GraphModule) -> bool:
    """Whether a result would have a gradient, as dynamo saw it."""
    (last,) = (node for node in graph.graph.nodes if node.op == "output")
    return any(
        isinstance(x := node.meta.get("example_value"), Tensor) and x.requires_grad
        for node in last.all_input_nodes
    )


def _tensors(args: Sequence[Any]) -> list[Tensor]:
    """Those among inputs."""
    return [x for x in args if isinstance(x, Tensor)]


def _text(source: object) -> str:
    """Where dynamo found a value, as an expression."""
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name)


def _path(source: object) -> str:
    """The name of a parameter in the model, from where dynamo found it; "" for what is none. What
    torch.export can not quote becomes _.
    """
    found = [*STEP.finditer(_text(source))]
    if not found or found[-1]["of"] != "parameters" or found[-1].end() != len(_text(source)):
        return ""
    path = ".".join(literal_eval(step["key"]) for step in found)
    return "".join("_" if x in "'\"\\" or not x.isprintable() else x for x in path)


def _aliases() -> dict[str, str]:
    """Other names of parameters in the model, each with where the graph has it from: dynamo, which
    compiles now, guards that they stay one.
    """
    context = TracingContext.try_get()
    found: dict[str, str] = {}
    for guard in context.guards_context.dynamo_guards if context else ():
        source = (getattr(guard.create_fn, "keywords", None) or {}).get("source_b")
        alias = _path(guard.originating_source)
        if alias and _path(source):
            found[alias] = _text(source)
    return found


def _context(device: torch.device, mesh: DeviceMesh) -> RankContext:
    """This rank's place in the job that torchrun started, or alone."""
    rank, world = 0, 1
    if mesh.num_ranks > 1:
        if not dist.is_initialized():
            raise CaptureError(
                f"{mesh} without a process group",
                expected="torch.distributed.init_process_group before the first call",
                remedy="start the script with torchrun and initialise the group",
            )
        rank, world = dist.get_rank(), dist.get_world_size()
    local = int(os.environ.get("LOCAL_RANK", rank))
    on_gpu = device.type == "cuda"
    return RankContext(
        rank=rank,
        world_size=world,
        local_rank=local,
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", world)),
        node=os.environ.get("GROUP_RANK", "0"),
        backend="nccl" if on_gpu else "gloo",
        device=f"cuda:{device.index or 0}" if on_gpu else "cpu",
    )
