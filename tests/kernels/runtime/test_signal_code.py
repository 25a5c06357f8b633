"""Machine code of the kernels that signal and wait, compiled for sm_90a without a GPU."""

from distmega.kernels.runtime.streams.signal_kernels import await_signal, raise_signal
from tests.kernels.sm90 import Machine, compile_kernel


def lines_of(code: Machine, *words: str) -> list[str]:
    return [line for line in code.ptx.splitlines() if all(word in line for word in words)]


def test_a_signal_is_released_to_the_system() -> None:
    code = compile_kernel(raise_signal, {"count": "*i32"}, {}, 1, None)
    (add,) = lines_of(code, ".add.")
    assert "release" in add
    assert ".sys." in add


def test_a_wait_polls_until_its_time_is_over_and_waits_for_no_other_thread() -> None:
    types = {"count": "*i32", "num_taken": "*i32", "late": "*i32", "limit_ns": "i64"}
    code = compile_kernel(await_signal, types, {}, 1, None)
    assert len(lines_of(code, "ld.acquire.sys.global.b32")) == 1
    assert len(lines_of(code, "%globaltimer")) == 2
    assert not lines_of(code, "bar.sync")
    assert code.registers < 32
