"""The peers of the superoptimizer's benchmark compute its programs."""

import pytest
import torch

from bench.superopt import compiled_by_torch, runner
from distmega.superopt.programs import read_case

CASES = (
    "gqa_decode ctx=32 heads=4 kv=2 dim=16 rows=1",
    "qknorm_attention ctx=32 heads=4 dim=16 rows=3",
    "rmsnorm_linear k=32 n=16 rows=3",
    "lora k=32 n=16 rank=4 rows=3",
    "gated_mlp k=32 n=16 rows=1",
    "ntrans hidden=32 rows=3",
)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a .functools.lru_cache")
@pytest.mark.parametrize("case", CASES)
def test_torch_compile_takes_the_whole_program(case: str) -> None:
    program = read_case(case)
    torch.manual_seed(0)
    inputs = {
        t.name: torch.randn(t.shape).to(torch.bfloat16) for t in program.tensors if t.role != "temp"
    }

    results = compiled_by_torch(program, backend="eager")(inputs)

    for result, plain in zip(results, runner(program)(inputs), strict=True):
        torch.testing.assert_close(result, plain, rtol=2e-2, atol=2e-2)
