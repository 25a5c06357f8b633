"""A module of torch on two ranks: captured as a program, planned, run by two processes on the CPU
and compared with the module itself.

    python examples/module.py    or    torchrun --standalone --nproc-per-node 2 examples/module.py

On a machine with two Hopper GPUs leave out `device="cpu"`: each rank then has one of them.
"""

import torch
from torch import Tensor, nn

import distmega
from distmega import DeviceMesh, Emit, RankContext
from distmega.launch import LauncherOptions, Result, launch

Values = tuple[dict[str, Tensor], Tensor]
"""Weights by name and x. Modules are no payload of a launch: ranks would have to import the class,
and find none of the file that is run.
"""


class Mlp(nn.Module):
    """down(silu(gate(x)) * up(x)) + x, of x [rows, 64]."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 256, bias=False)
        self.up = nn.Linear(64, 256, bias=False)
        self.down = nn.Linear(256, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x)) + x


def run_rank(context: RankContext, values: Values, emit: Emit) -> Tensor:
    """What each rank does: makes the whole module, captures it, and compiles its own part of it."""
    module = Mlp().eval()
    weights, x = values
    module.load_state_dict(weights)
    module, x = module.to(context.device), x.to(context.device)
    captured = distmega.capture(module, (x,))
    compiled = captured.compile(context, DeviceMesh(tp=context.world_size))
    y = compiled(x)  # whole on every rank, as x is
    emit(compiled.explain())
    return y.cpu()


def main() -> None:
    """Prints what was chosen, and the largest difference to the module in torch."""
    torch.manual_seed(0)  # under torchrun each rank makes the values, and they must be the same
    module, x = Mlp().eval(), torch.randn(8, 64)
    values = module.state_dict(), x
    with torch.no_grad():
        expected = module(x)
    for event in launch(run_rank, values, LauncherOptions(num_ranks=2, device="cpu")):
        if isinstance(event, Result):
            print("largest difference to torch:", (event.value - expected).abs().max().item())
            torch.testing.assert_close(event.value, expected)
        else:
            print(event.value)


if __name__ == "__main__":
    main()
