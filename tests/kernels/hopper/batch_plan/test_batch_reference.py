"""Queues of programs of 2 to 16 rows, done by their words on a CPU, give what torch does."""

import random

import pytest
import torch

from distmega.compiled import CompiledProgram
from distmega.errors import UnsupportedError
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.kernels.hopper.batch_plan.queues import build_batch_queues
from distmega.kernels.hopper.plan.weight_order import order_weights
from distmega.kernels.machines import CPU
from distmega.kernels.runtime.arena import Space, layout_arena
from distmega.program.builder import Handle
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.planner import plan_program
from tests.kernels.hopper.batch_plan.reference import Reference
from tests.kernels.hopper.batch_plan.test_batch_programs import PROGRAMS, Maker, program_of

MESH = DeviceMesh(tp=1)
WITHOUT_ATTENTION = [name for name in PROGRAMS if name != "attention"]


def random_weights(program: Program) -> dict[str, torch.Tensor]:
    return {
        tensor.name: torch.randn(tensor.shape) * tensor.shape[-1] ** -0.5
        for tensor in program.with_role("weight")
    }


def require_same(bf16: Program, f32: Program, num_sms: int) -> None:
    """What queues for a program give, in two steps on end, SMs in any order within an instruction,
    is what torch gives in float32.
    """
    weights = random_weights(bf16)
    layout = layout_arena(Space.WEIGHT, order_weights(bf16))
    queues = build_batch_queues(bf16, layout, layout_arena(Space.STATE, ()), num_sms)
    reference = Reference(queues, layout, weights)
    step = CompiledProgram(plan_program(f32, MESH, CPU), SingleCommunicator(MESH))
    (given,) = bf16.with_role("input")
    order = list(range(num_sms))
    for seed in range(2):
        random.Random(seed).shuffle(order)
        x = torch.randn(given.shape)
        expected = step(step.parts({**weights, given.name: x}))
        for name, found in reference.step(x, order).items():
            torch.testing.assert_close(found.float(), expected[name], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("rows", "num_sms"), [(16, 132), (3, 5)])
@pytest.mark.parametrize("name", WITHOUT_ATTENTION)
def test_queues_compute_the_program(name: str, rows: int, num_sms: int):
    torch.manual_seed(0)
    require_same(program_of(name, rows), program_of(name, rows, "f32"), num_sms)


WIDTHS = 64, 192, 320
ONE = "relu(a0)", "tanh(a0)", "silu(a0) * 0.5", "gelu(a0)"
TWO = "a0 + a1", "silu(a0) * a1", "a1 - a0", "maximum(a0, a1)"
THREE = "a0 + a1 * a2", "a0 * a1 + a2", "silu(a0) * a1 + a2"


class Random(Maker):
    """A program of linears, norms and formulas of what was made before, the same for each seed."""

    def __init__(self, seed: int, dtype: str) -> None:
        self.random = random.Random(seed)
        super().__init__(self.random.randint(2, 16), dtype)
        self.made = [self.input(self.random.choice(WIDTHS))]
        self.norms: dict[tuple[str, str], Handle] = {}
        self.num, self.biased = 0, self.random.random() < 0.3

    def build(self) -> Program:
        for _ in range(self.random.randint(2, 7)):
            self.made.append(self.result(self.taken(), self.random.choice(WIDTHS)))
        outs = self.made[-1:] + (self.made[-2:-1] if self.random.random() < 0.3 else [])
        return self.p.build(*outs)

    def taken(self) -> Handle:
        """Something that was made lately, as it is or after a norm."""
        x, kind = self.random.choice(self.made[-3:]), self.random.choice(("", "", "rms", "layer"))
        if not kind:
            return x
        if (kind, x.name) not in self.norms:
            norm = self.rms if kind == "rms" else self.layer_norm
            self.norms[kind, x.name] = norm(x, f"n{len(self.norms)}")
        return self.norms[kind, x.name]

    def product(self, x: Handle, width: int) -> Handle:
        self.num += 1
        return self.linear(x, f"w{self.num}", width, bias=self.biased)

    def result(self, x: Handle, width: int) -> Handle:
        y, like = self.product(x, width), [one for one in self.made if one.shape[-1] == width]
        match self.random.randint(0, 4 if like else 2):
            case 1:
                return y.map(self.random.choice(ONE))
            case 2:
                return self.p.pointwise(self.random.choice(TWO), y, self.product(x, width))
            case 3:
                return self.p.pointwise(self.random.choice(TWO), y, self.random.choice(like))
            case 4:
                others = (self.random.choice(like) for _ in range(2))
                return self.p.pointwise(self.random.choice(THREE), y, *others)
        return y


def require_random(seeds: range) -> None:
    """Programs that no kernel takes are refused by an UnsupportedError, a few of all."""
    refused = 0
    for seed in seeds:
        torch.manual_seed(seed)
        bf16, f32 = (Random(seed, dtype).build() for dtype in ("bf16", "f32"))
        try:
            require_same(bf16, f32, 7)
        except UnsupportedError:
            refused += 1
    assert refused <= len(seeds) // 4


def test_random_programs():
    require_random(range(16))


@pytest.mark.nightly
def test_many_random_programs():
    require_random(range(16, 300))
