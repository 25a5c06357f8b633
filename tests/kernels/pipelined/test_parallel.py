"""Kernels that compile at once, while the garbage collector lets other threads in."""

import gc
import inspect
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import triton
from triton.experimental import gluon

from distmega.kernels.pipelined import parallel


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
    with parallel.compiling(1), ThreadPoolExecutor(4) as pool:
        futures: list[Future[int]] = [pool.submit(parse_often) for _ in range(4)]
    assert [future.result() for future in futures] == [300] * 4
    assert inspect.getattr_static(triton.JITFunction, "parse") is parse
