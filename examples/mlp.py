"""An MLP written op by op, planned for two tensor-parallel ranks, run by two processes on the CPU
and compared with plain torch. The walk through the code starts here; next:
distmega/program/types.py.

    python examples/mlp.py      or      torchrun --standalone --nproc-per-node 2 examples/mlp.py
"""

import torch

from distmega import (
    CPU,
    DeviceMesh,
    Emit,
    Program,
    ProgramBuilder,
    RankContext,
    compile_plan,
    plan_program,
)
from distmega.launch import LauncherOptions, Result, launch

Values = dict[str, torch.Tensor]


def build_mlp() -> Program:
    """y = silu(x w1') w2' + x."""
    p = ProgramBuilder("mlp")
    x = p.input("x", (8, 64))
    h = p.linear(x, p.weight("w1", (256, 64))).map("silu(a0)")
    return p.build(p.linear(h, p.weight("w2", (64, 256))).map("a0 + a1", x, name="y"))


def run_rank(context: RankContext, values: Values, emit: Emit) -> torch.Tensor:
    """What each rank does: the same plan everywhere, its own part of each weight."""
    mesh = DeviceMesh(tp=context.world_size)
    plan = plan_program(build_mlp(), mesh, CPU)
    emit(plan.explain())
    step = compile_plan(plan, context)
    return step(step.parts(values))["y"]


def main() -> None:
    """Prints the plan and the largest difference to torch."""
    torch.manual_seed(0)  # under torchrun each rank makes the values, and they must be the same
    given = [t for t in build_mlp().tensors if t.role != "temp"]
    values = {t.name: torch.randn(t.shape) / t.shape[-1] ** 0.5 for t in given}
    x, w1, w2 = values["x"], values["w1"], values["w2"]
    expected = torch.nn.functional.silu(x @ w1.T) @ w2.T + x
    for event in launch(run_rank, values, LauncherOptions(num_ranks=2, device="cpu")):
        if isinstance(event, Result):
            print("largest difference to torch:", (event.value - expected).abs().max().item())
            torch.testing.assert_close(event.value, expected)
        else:
            print(event.value)


if __name__ == "__main__":
    main()
