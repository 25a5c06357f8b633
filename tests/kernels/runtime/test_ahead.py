"""Kernels that compile at once, while the garbage collector lets other threads in."""

import ast
import gc
import inspect
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import triton
from triton import language as tl
from triton.experimental import gluon

import distmega
from distmega import lazy
from distmega.collecting import parse_literal
from distmega.kernels.runtime import ahead
from distmega.program import expr
from tests.kernels import offline
from tests.repo.source import ROOT


@gluon.jit
def long_kernel(a):
    a = a + (a * (a + (a * (a + (a * (a + a))))))
    a = a + (a * (a + (a * (a + (a * (a + a))))))
    a = a + (a * (a + (a * (a + (a * (a + a))))))
    a = a + (a * (a + (a * (a + (a * (a + a))))))
    a = a + (a * (a + (a * (a + (a * (a + a))))))
    a = a + (a * (a + (a * (a + (a * (a + a))))))
    return a


def parse_often() -> int:
    return sum(len(long_kernel.parse().body) for _ in range(300))


@pytest.fixture
def yielding_collector() -> Iterator[None]:
    """Each collection of garbage lets another thread run, as finalizers in Python do."""

    def let_others_run(*_: object) -> None:
        time.sleep(0)

    gc.callbacks.append(let_others_run)
    yield
    gc.callbacks.remove(let_others_run)


@pytest.mark.usefixtures("yielding_collector")
def test_threads_that_parse_at_once():
    parse = inspect.getattr_static(triton.JITFunction, "parse")
    with ahead.compiling(1), ThreadPoolExecutor(4) as pool:
        futures: list[Future[int]] = [pool.submit(parse_often) for _ in range(4)]
    assert [future.result() for future in futures] == [300] * 4
    assert inspect.getattr_static(triton.JITFunction, "parse") is parse


def test_the_first_of_two_blocks_to_end_leaves_the_other_guarded():
    """As those of two engines that open in two threads."""
    parse = inspect.getattr_static(triton.JITFunction, "parse")
    one, other = ahead.parsing_in_turn(), ahead.parsing_in_turn()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert inspect.getattr_static(triton.JITFunction, "parse") is not parse
    other.__exit__(None, None, None)
    assert inspect.getattr_static(triton.JITFunction, "parse") is parse


@triton.jit
def scale_kernel(x, y, factor: tl.constexpr, block: tl.constexpr):
    places = tl.arange(0, block)
    tl.store(y + places, tl.load(x + places) * factor)


def test_kernels_are_ready_when_the_block_ends(monkeypatch: pytest.MonkeyPatch):
    """Each is compiled and loaded once and nothing runs; launches afterwards find them."""
    launched: list[tuple[object, ...]] = []
    monkeypatch.setattr(offline._Launcher, "__call__", lambda self, *given: launched.append(given))
    x = torch.zeros(64)

    def launch_all() -> None:
        for factor in (2, 3, 2):
            ahead.launch(scale_kernel, (1,), x, x, factor=factor, block=64, num_warps=1)

    with offline.offline(monkeypatch) as loaded:
        with ahead.launching_nothing(torch.device("cpu")):
            assert ahead.launches_nothing()
            launch_all()
        assert not ahead.launches_nothing()
        assert len(loaded) == 2
        assert not launched
        launch_all()
    assert len(loaded) == 2
    assert len(launched) == 3


def test_a_kernel_that_does_not_compile_is_told_when_it_is_launched(
    monkeypatch: pytest.MonkeyPatch,
):
    with offline.offline(monkeypatch):
        given = scale_kernel, (1,), torch.zeros(64), None
        with ahead.launching_nothing(torch.device("cpu")):
            ahead.launch(*given, factor=2, block=63)
        with pytest.raises(triton.CompilationError):
            ahead.launch(*given, factor=2, block=63)


@pytest.mark.parametrize("room", ["library", "pipelined", "ugraphs"])
def test_kernels_of_library_ops_are_launched_where_a_block_can_keep_them(room: str):
    """Elsewhere a rehearsal would run them, on memory that nobody has computed."""
    direct = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / "kernels" / room).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and isinstance(node.func.slice, ast.Tuple)
    ]
    assert not direct


@pytest.mark.usefixtures("yielding_collector")
def test_threads_that_parse_kernels_beside_those_that_parse_texts():
    """Of ops, attributes and doors."""
    texts = [f"a0 + {'(1 + ' * 20}{n}{')' * 20}" for n in range(300)]
    literals = [repr(((n, (1, (2, (3, (4,))))),)) for n in range(300)]
    door = Path(distmega.__file__).read_text()

    def parse_texts() -> int:
        found = [(expr.parse(a), parse_literal(b)) for a, b in zip(texts, literals, strict=True)]
        return len(found) + len([*lazy._imported(door)])

    num_texts = parse_texts()
    expr._parse.cache_clear()
    with ahead.compiling(1), ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(each) for each in (parse_often, parse_texts) * 2]
    assert [future.result() for future in futures] == [300, num_texts] * 2
