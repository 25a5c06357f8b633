"""What a CUDA graph can hold of a prompt: ops that neither wait for the GPU nor copy to it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from distmega.engine.decode_planner import lower_decode, lower_library_decode, plan_decode
from distmega.engine.prefill_planner import lower_prefill
from distmega.engine.requests import EngineOptions
from distmega.hostir.ir.nodes import HostProgram, LibraryOp
from distmega.hostir.library import ops as library
from distmega.hostir.library.pointwise import evaluate_all
from distmega.hostir.library.torch_types import torch_dtype
from distmega.hostir.run.graph_breaks import graph_breaks
from distmega.kernels.library.device_ops import KernelOps
from distmega.kernels.machines import H200
from distmega.kernels.ugraphs.ops import compile_graph
from distmega.models.sampling import Sampling
from distmega.program import expr
from distmega.program.kinds import FUSED_GRAPH
from distmega.program.ops.lookups import embedding_values
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sources.load import open_model
from distmega.superopt.rules import shipped_rules

META = torch.device("meta")
WAITING = ("nonzero", "_local_scalar_dense", "masked_select", "unique")
"""Torch's ops that ask the device for a number."""
COPYING = ("copy_", "_to_copy", "where", "index", "index_put_", "cat", "stack")
"""Those that copy an operand of the CPU to the device; pointwise ones take it as an argument."""


FROM_PYTHON = (torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy)


class NoData(TorchFunctionMode):
    """Refuses tensors made of Python's values."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        assert func not in FROM_PYTHON, f"{func.__name__} takes values from Python"
        return func(*args, **kwargs or {})


class NoCopies(TorchDispatchMode):
    """Refuses ops that wait for the device or copy an operand to it."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        name = func.overloadpacket.__name__
        assert name not in WAITING, f"{name} needs the host"
        if name in COPYING:
            given = [x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, Tensor)]
            assert all(x.device == META for x in given), f"{name} copies from the host"
        return func(*args, **kwargs or {})


@contextmanager
def host_free() -> Iterator[None]:
    """Refuses what a capture would: on `meta`, which stands for a device that is not the host."""
    with NoData(), NoCopies():
        yield


def host_program(batch: int, sampling: Sampling, decodes: bool = False) -> HostProgram:
    """A prompt, or a decode step by library ops, through one layer on two GPUs."""
    config = replace(open_model("smollm2-135m").config, num_layers=1)
    options = EngineOptions(max_context=64, batch=batch)
    method, mesh = sampling.method, DeviceMesh(tp=2)
    staged = plan_decode(config, mesh, H200, options, method=method)
    lowered = lower_decode(config, staged, options, peer_memory=True, method=method)
    return lower_library_decode(lowered) if decodes else lower_prefill(lowered, 48, "none")


def run_ops(host: HostProgram, kinds: set[str]) -> None:
    """Each library op of these kinds, twice: constants may be made the first time."""
    buffers = host.buffer_map()
    for node in host.body:
        if isinstance(node, LibraryOp) and node.op.kind in kinds:
            if node.op.kind == FUSED_GRAPH:
                function = compile_graph(node.op, {rule.name: rule for rule in shipped_rules()})
            else:
                function = library.compile_op(node.op, {"tp": 1})
            named = [buffers[name] for name in library.op_operands(node.op)]
            given = [torch.empty(b.shape, dtype=torch_dtype(b.dtype), device=META) for b in named]
            function(given)
            with host_free():
                function(given)


def kinds_of(host: HostProgram) -> set[str]:
    return {node.op.kind for node in host.body if isinstance(node, LibraryOp)}


def breaks(host: HostProgram) -> list[str]:
    """What keeps a program from being one graph on a GPU."""
    device = torch.device("cuda:0")
    return [*graph_breaks(host, device, KernelOps(), signals_on_device=False)]


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (0, 0.9), (50, 0.9), (50, 1.0)])
def test_prompts_need_nothing_of_the_host(top_k: int, top_p: float):
    host = host_program(1, Sampling(temperature=1.0, top_k=top_k, top_p=top_p))
    assert {"attention", "fused_heads", "embedding", "sample"} < kinds_of(host)
    run_ops(host, kinds_of(host) - {"attention"})
    ops = [node.op for node in host.body if isinstance(node, LibraryOp)]
    assert all(library.is_packed(op) for op in ops if op.kind == "attention"), "for the kernel"
    assert not breaks(host)


@pytest.mark.parametrize("batch", [1, 3])
def test_of_a_decode_step_torchs_attention_alone_needs_the_host(batch: int):
    host = host_program(batch, Sampling(temperature=1.0, top_p=0.9), decodes=True)
    run_ops(host, kinds_of(host) - {"attention"})
    assert not breaks(host), "a kernel attends"
    with pytest.raises((AssertionError, RuntimeError)):
        run_ops(host, {"attention"})


def test_an_embedding_divided_over_ranks_needs_nothing_of_the_host():
    ids, table = torch.zeros(3, dtype=torch.int64, device=META), torch.empty(8, 4, device=META)
    with host_free():
        embedding_values(ids, table, 8, 16)


@pytest.mark.parametrize("text", ["where(a0, 0.0, a1)", "where(1.0, a1, 0.0)", "where(a0, 2, 1)"])
def test_constants_of_a_choice_are_made_where_the_operands_are(text: str):
    xs = torch.empty(3, dtype=torch.bool, device=META), torch.empty(3, device=META)
    given = [expr.parse(text)], xs, (torch.float32,)
    evaluate_all(*given)  # constants are kept from here on
    with host_free():
        evaluate_all(*given)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x + torch.tensor([1.0, 2.0], device=META),
        lambda x: torch.where(x > 0, x, torch.zeros(())),
        lambda x: x[torch.tensor([0, 1])],
        lambda x: x.nonzero(),
        lambda x: x * x.sum().item(),
    ],
)
def test_what_needs_the_host_is_seen(call: Callable[[Tensor], object]):
    with pytest.raises((AssertionError, RuntimeError, NotImplementedError)), host_free():
        call(torch.empty(2, device=META))
