"""Programs for a memory checker to look at: CASES of 1 to 16 rows in one launch each, and SMALL, a
short one of every kernel that has grown here.

`python -m tests.gpu.memchecked NAME...` runs the programs of these names twice each; see
test_memcheck.py.
"""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
import triton
import triton.language as tl
from torch import Tensor

from distmega.compiled import CompiledProgram
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.kernels.library.packed_attention import attend_by_groups, attend_packed
from distmega.kernels.machines import H200
from distmega.models.sampling import Sampling
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.planner import plan_program
from tests.gpu import test_gemm, test_grouped_products, test_prefill
from tests.gpu.engines import open_engine, random_model
from tests.kernels.hopper.row_plan.test_expert_queues import layers
from tests.kernels.records.programs import program_of, values_of
from tests.kernels.row_programs import HEADS, PROGRAMS, attending, prompt, random_values

MESH = DeviceMesh(tp=1)
OVERRUN = "overrun"
"""The name of a kernel that writes behind its memory."""


@triton.jit
def decode_overrun(x):
    tl.store(x + 100, 1.0)


def overrun() -> None:
    """What a checker must see."""
    decode_overrun[(1,)](torch.zeros(64, device="cuda"))
    torch.cuda.synchronize()


def run_program(
    make: Callable[[], Program],
    device: str = "cuda:0",
    values_of: Callable[[Program], Mapping[str, Tensor]] = random_values,
) -> None:
    """Two calls. Without replay, since a graph can't be captured where memory is not cached."""
    program = make()
    plan = plan_program(program, MESH, H200)
    step = CompiledProgram(
        plan, SingleCommunicator(MESH), device, warm=True, replay=False, megakernel=True
    )
    values = values_of(program)
    for name, tensor in step.tensors.items():
        tensor.copy_(values[name])
    inputs = {t.name: values[t.name].to(device) for t in program.with_role("input")}
    for _ in range(2):
        step(inputs)
    step.wait()


def run_engine(batch: int, sampling: Sampling) -> None:
    """Steps of an engine of two layers, two launches, the second from where the first ended."""
    source = random_model("smollm2-135m", num_layers=2)
    engine = open_engine(source, batch, max_context=256, sampling=sampling)
    assert engine.stepping is not None
    engine.stepping.start([5 + b for b in range(batch)], [127] * batch, engine._sample_inputs)
    for _ in range(2):
        engine.stepping.run_steps(2)
    torch.cuda.synchronize()
    engine.stepping.raise_hang()


LIMITED = Sampling(temperature=15.0, top_k=40, top_p=0.9, seed=3)
CASES: Mapping[str, Callable[[], None]] = MappingProxyType(
    {
        **{
            f"{name} of {rows}": partial(run_program, partial(make, rows))
            for name, make in PROGRAMS.items()
            for rows in (1, 5)
        },
        **{
            f"heads {name}": partial(run_program, partial(attending, rows=3, **more))
            for name, more in HEADS.items()
        },
        "wide heads": partial(run_program, partial(attending, dim=256, heads=1, group=8)),
        "a bias": partial(run_program, partial(attending, heads=2, group=3, biased=True)),
        "experts of 1": partial(run_program, partial(layers, num=2)),
        "experts of 5": partial(run_program, partial(layers, num=2, rows=5)),
        **{
            f"steps of {batch}, {sampling.method.kind}": partial(run_engine, batch, sampling)
            for batch in (1, 3)
            for sampling in (Sampling(), LIMITED)
        },
        OVERRUN: overrun,
    }
)


BY_RECORDS = ("odd_gate", "bf16"), ("batched", "bf16"), ("attended", "bf16"), ("states", "f32")
SMALL: Mapping[str, tuple[str, Callable[[], None]]] = MappingProxyType(
    {
        "1 row": ("decode", partial(run_program, partial(attending, 1, 2, group=2))),
        **{
            f"{rows} rows": ("decode", partial(run_program, partial(attending, 1, 2, rows=rows)))
            for rows in (4, 16, 64)
        },
        "rows of a prompt": ("decode", partial(run_program, partial(prompt, 5))),
        "rows of a long prompt": (
            "decode",
            partial(
                run_program,
                partial(prompt, 5, context=900),
                values_of=partial(random_values, first=800),
            ),
        ),
        "expert, 1 row": ("decode", partial(run_program, partial(layers, 1))),
        "expert, 5 rows": ("decode", partial(run_program, partial(layers, 1, rows=5))),
        **{
            f"records, {kind}": (
                "run_records",
                partial(run_program, partial(program_of, kind, dtype), values_of=values_of),
            )
            for kind, dtype in BY_RECORDS
        },
        "matmul with a formula": (
            "matmul_kernel",
            partial(test_gemm.test_two_weights_become_one_column, 300, 392, 200, 128),
        ),
        "packed attention": (
            "attend_rows",
            partial(
                test_prefill.test_packed_attention_is_that_of_float64,
                64,
                4,
                300,
                attend_packed,
                softcap=0.0,
            ),
        ),
        "attention by groups": (
            "attend_kernel",
            partial(
                test_prefill.test_packed_attention_is_that_of_float64,
                64,
                4,
                300,
                attend_by_groups,
                softcap=0.0,
            ),
        ),
        "products of groups": (
            "multiply_groups",
            partial(
                test_grouped_products.test_products_are_those_of_float64,
                *("static", 700, 2, 5, 3, 5, 72, 200),
            ),
        ),
        OVERRUN: ("decode", overrun),
    }
)
"""Name -> a part of the names of the kernels to look at, and what runs them."""


def main() -> None:
    for name in sys.argv[1:]:
        run = CASES[name] if name in CASES else SMALL[name][1]
        run()
        torch.cuda.synchronize()
        print(f"done: {name}", flush=True)


if __name__ == "__main__":
    main()
