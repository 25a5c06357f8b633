"""What ends a step of library ops: results under Triton's interpreter, machine code for sm_90a."""

from distmega.kernels.library.step_ends import end_step_kernel
from tests.forked import run_module
from tests.kernels.sm90 import compile_kernel


def test_interpreted_ends_of_steps_are_torchs() -> None:
    done = run_module("tests.kernels.library.step_ends_interpreted")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 0


def test_the_number_is_written_once_all_have_read_it() -> None:
    tensors = ("found", "ids", "positions", "counted", "kept", "number")
    types: dict[str, object] = dict.fromkeys(tensors, "*i64") | {"batch": "i32", "most": "i32"}
    code = compile_kernel(end_step_kernel, types, {"padded": 64}, 1, None)
    assert code.stack_bytes == 0
    *_, behind = code.ptx.split("bar.")
    assert "ld.global" not in behind
    assert behind.count("st.global") == 1
