"""Norms and pointwise ops on the CPU, how operands become a matrix, what the choices promise."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distmega.errors import ProgramError
from distmega.kernels.pipelined import api
from distmega.kernels.pipelined.choices import (
    RESERVED_BYTES,
    SHARED_BYTES,
    GpuModel,
    KernelChoice,
    Traffic,
    flat_choices,
    matrix_choices,
    plain_choices,
    plain_row_choices,
    row_choices,
    shared_bytes,
)
from distmega.kernels.pipelined.pointwise.views import as_matrix
from distmega.kernels.pipelined.tuning import read_choices, write_choices
from tests.fuzz import changed, fuzz_target

H200 = GpuModel(num_sms=132, bandwidth_bytes_per_us=4.3e6)


ROWS = torch.ones(2, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_norms_agree_with_float64(dtype):
    x, residual = torch.randn(2, 5, 96).to(dtype), torch.randn(2, 5, 96).to(dtype)
    weight, bias = torch.randn(96).to(dtype), torch.randn(96).to(dtype)
    y, total = api.rms_norm(x, weight, residual=residual, eps=1e-5)
    wide = total.double()
    assert torch.equal(total, (x.double() + residual.double()).to(dtype))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    torch.testing.assert_close(y, (wide * scale * weight.double()).to(dtype))
    expected = torch.nn.functional.layer_norm(
        wide, [96], weight.double(), bias.double(), eps=1e-5
    ).to(dtype)
    torch.testing.assert_close(api.layer_norm(total, weight, bias), expected)
    torch.testing.assert_close(api.softmax(x), torch.softmax(x.double(), -1).to(dtype))


def test_pointwise_broadcasts_and_has_many_results():
    x, row, column = torch.randn(6, 8), torch.randn(8), torch.randn(6, 1)
    single = api.pointwise("a0 * a1 + a2", x, row, column)
    torch.testing.assert_close(single, x * row + column)
    many = api.pointwise(["a1", "2"], x, row, dtypes=[torch.float64, torch.bfloat16])
    assert [y.dtype for y in many] == [torch.float64, torch.bfloat16]
    assert torch.equal(many[0], row.double().expand(6, 8))
    assert torch.equal(many[1], torch.full((6, 8), 2, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: api.pointwise("a0 + a2", torch.ones(2), torch.ones(2)), "argument a2"),
        (lambda: api.pointwise("a0 + a1", torch.ones(2), torch.ones(3)), r"shapes \[\[2\], \[3\]"),
        (lambda: api.pointwise(["a0"] * 5, torch.ones(2)), "5 expressions"),
        (lambda: api.pointwise("a0", torch.ones(2), dtypes=[]), "0 dtypes"),
        (lambda: api.rms_norm(torch.ones(2, 3), torch.ones(2)), "weight or bias"),
        (lambda: api.rms_norm(torch.ones(2, 3), residual=torch.ones(3)), "residual"),
        (lambda: api.softmax(torch.ones(())), "rows of a tensor"),
        (lambda: api.softmax(torch.ones(2, dtype=torch.int32)), "rows of torch.int32"),
        (lambda: api.softmax(ROWS.to(torch.float8_e5m2)), "rows of torch.float8_e5m2"),
        (lambda: api.softmax([1.0]), "^x: list, no tensor; expected a torch.Tensor; convert it"),
        (lambda: api.rms_norm(None), "^x: NoneType, no tensor"),
        (lambda: api.rms_norm(ROWS.to_sparse()), "^x: a sparse_coo tensor; expected a dense one"),
        (lambda: api.rms_norm(ROWS, np.ones(3)), "^weight: ndarray, no tensor"),
        (lambda: api.layer_norm(ROWS, bias=3), "^bias: int, no tensor"),
        (
            lambda: api.rms_norm(ROWS, residual=ROWS.cfloat()),
            "^residual of torch.complex64; ",
        ),
        (lambda: api.rms_norm(ROWS, residual=ROWS.to("meta")), "on cpu, meta; expected .* one dev"),
        (lambda: api.rms_norm(ROWS, eps="1e-6"), "^eps '1e-6'; expected at least 0"),
        (lambda: api.pointwise("a0 + a1", ROWS, 2.0), "^operand a1: float, no tensor"),
        (lambda: api.pointwise("a0", ROWS.to(torch.float8_e5m2)), "^operand a0 of torch.float8_e5"),
        (lambda: api.pointwise(2, ROWS), "^expressions 2; expected an expression of a0"),
        (lambda: api.pointwise(["a0", 2], ROWS), r"^expressions \['a0', 2\]; expected"),
        (lambda: api.pointwise("a0", ROWS, dtypes=torch.half), "^dtypes torch.float16; .*sequence"),
        (lambda: api.pointwise("a0", ROWS, dtypes=["f32"]), r"^dtypes \['f32'\]; expected"),
    ],
)
def test_what_does_not_fit_is_named(call, message):
    with pytest.raises(ProgramError, match=message):
        call()


def test_functions_are_found_without_importing_torch_first():
    code = (
        "import sys, distmega, distmega.kernels as k\n"
        "assert 'torch' not in sys.modules and 'triton' not in sys.modules\n"
        "assert k.rms_norm.__name__ == 'rms_norm'\n"
        "assert not hasattr(k, 'no_such_name')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@st.composite
def operands(draw: st.DrawFn) -> tuple[list[int], list[torch.Tensor]]:
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    found = []
    for _ in range(draw(st.integers(1, 3))):
        extents = [1 if draw(st.booleans()) else extent for extent in shape]
        order = draw(st.permutations(range(len(shape))))
        storage = torch.arange(100.0).repeat(8)[: int(np.prod(extents))]
        back = [order.index(dim) for dim in range(len(shape))]
        x = storage.view([extents[dim] for dim in order]).permute(back)
        found.append(x)
    return shape, found


@given(operands())
def test_a_matrix_holds_the_operands_elements(drawn):
    shape, tensors = drawn
    matrix = as_matrix(shape, [(x.shape, x.stride()) for x in tensors])
    if matrix is None:
        return
    for x, strides in zip(tensors, matrix.strides, strict=True):
        seen = x.as_strided((matrix.rows, matrix.columns), strides)
        assert torch.equal(seen.reshape(-1), x.expand(shape).reshape(-1))


@pytest.mark.parametrize("num_elements", [1000, 2**19, 2**23, 2**27, 2**31])
@pytest.mark.parametrize(("in_bytes", "out_bytes"), [(0, 2), (2, 2), (4, 2), (8, 2), (32, 16)])
def test_choices_fit_an_sm(num_elements, in_bytes, out_bytes):
    traffic = Traffic(in_bytes=in_bytes, out_bytes=out_bytes, num_elements=num_elements)
    rows = -(-num_elements // 4096)
    lists = [
        flat_choices(traffic, H200, 64),
        flat_choices(traffic, H200, 0),
        matrix_choices(rows, 4096, traffic, H200),
    ]
    lists += [row_choices(rows, 2**k, traffic, H200) for k in (7, 10, 12, 14, 16)]
    for choices in lists:
        assert choices
        for choice in choices:
            if not choice.stages:
                continue
            bytes_taken = shared_bytes(choice, traffic) + RESERVED_BYTES
            assert bytes_taken * choice.programs_per_sm <= SHARED_BYTES + RESERVED_BYTES
            assert choice.num_warps * choice.programs_per_sm <= 32


NORMS_MEASURED = {
    (32, 1024): {(1, 4): 1.08, (2, 8): 1.18, (4, 16): 1.41, (8, 32): 1.75},
    (512, 1024): {(1, 4): 1.98, (2, 8): 2.11, (4, 16): 2.30, (8, 32): 2.59},
    (64, 2048): {(1, 8): 1.24, (2, 16): 1.49, (4, 32): 2.01},
    (1024, 2048): {(1, 8): 3.56, (2, 16): 3.47, (4, 32): 3.68},
    (64, 4096): {(1, 16): 1.72, (2, 32): 2.37},
    (256, 4096): {(1, 16): 2.66, (2, 32): 3.09},
    (64, 8192): {(1, 32): 2.71, (2, 32): 3.59},
}
"""Rows and columns of a norm of a bf16 sum -> us on an H200 by rows and warps of a program, in a
graph of norms one behind the other."""


@pytest.mark.parametrize("size", NORMS_MEASURED)
def test_norms_of_few_rows_run_on_many_sms(size):
    """Within a twentieth of the best."""
    traffic = Traffic(in_bytes=4, out_bytes=4, num_elements=size[0] * size[1])
    choice, times = row_choices(*size, traffic, H200)[0], NORMS_MEASURED[size]
    assert choice.tile[1] == size[1]
    assert times[choice.tile[0], choice.num_warps] <= 1.05 * min(times.values())


def test_every_shape_has_plain_choices():
    for num_elements in (1, 1000, 2**31):
        traffic = Traffic(in_bytes=2, out_bytes=2, num_elements=num_elements)
        for choice in plain_choices(traffic, H200):
            assert choice.stages == 0
            assert choice.tile[0] in (256 * choice.num_warps, 512 * choice.num_warps)
    for columns in (1, 100, 1024, 5000, 16384, 16385, 10**6):
        traffic = Traffic(in_bytes=2, out_bytes=2, num_elements=3 * columns)
        choices = plain_row_choices(3, columns, traffic, H200)
        assert choices
        assert all(c.tile[1] >= columns for c in choices) == (columns <= 16384)


def test_choices_are_kept_in_a_file(tmp_path, caplog):
    choice = KernelChoice(tile=(1, 64), num_warps=4, stages=2, buffers=1, programs_per_sm=2, run=0)
    path = tmp_path / "folder" / "choices.json"
    assert read_choices(path) == {}
    write_choices(path, {"a class": choice})
    assert read_choices(path) == {"a class": choice}
    path.write_text('{"a class": {"tile": 5}}')
    assert read_choices(path) == {}
    assert "measuring anew" in caplog.text
    for text in ("[" * 10**5, '{"a": ' + json.dumps(asdict(replace(choice, num_warps=-1))) + "}"):
        path.write_text(text)
        assert read_choices(path) == {}
    path.unlink()
    os.mkfifo(path)
    assert read_choices(path) == {}


def read_damaged(data: object) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "choices.json"
        path.write_text(json.dumps(data))
        for choice in read_choices(path).values():
            assert min(choice.tile, default=0) >= 0
            assert choice.num_warps >= 0


STORED = {
    "a class": asdict(
        KernelChoice(tile=(1, 64), num_warps=4, stages=2, buffers=1, programs_per_sm=2, run=0)
    )
}
test_choice_files = fuzz_target(changed([STORED]), read_damaged)
