"""Pointwise work on 2 to 16 rows, emulated: what torch computes, in any order of SMs."""

from collections.abc import Mapping

import pytest
import torch

from distmega.errors import UnsupportedError
from distmega.program.builder import Handle
from distmega.program.types import Program
from distmega.sharding.layout.placements import Layout, replicate, shard
from tests.kernels.hopper.batch_plan.test_batch_pointwise import heads_normed, two_lookups
from tests.kernels.hopper.batch_plan.test_batch_reference import Random
from tests.kernels.hopper.emulator.batch.test_batch_emulator import MOST_ERROR, batch_case, emulate
from tests.kernels.hopper.emulator.emulating import NO_MARKS, error, expected
from tests.kernels.row_programs import PROGRAMS, random_values


def require_right(
    program: Program, seed: int, num_sms: int = 5, marks: Mapping[str, Layout] = NO_MARKS
) -> None:
    """Two calls with other inputs each; tokens chosen too. marks: how two ranks divide weights."""
    values = [random_values(program, seed + number) for number in range(2)]
    case = batch_case(program, 2 if marks else 1, num_sms, marks)
    inputs = [{t.name: one[t.name] for t in program.with_role("input")} for one in values]
    exact = expected(program, values[0], inputs)
    found = emulate(case, values[0], inputs, seed)
    for ranks, wanted in zip(found, exact, strict=True):
        for one in ranks:
            for name, out in one.outputs.items():
                assert error(out, wanted[name]) < MOST_ERROR
            if "next" in wanted:
                assert one.ids == (tuple(wanted["next"].tolist()),)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_give_what_torch_does(name: str):
    require_right(PROGRAMS[name](3), seed=1)


def test_one_row_in_the_kernel_of_several():
    require_right(PROGRAMS["plain_layer_norms"](1), seed=1)


@pytest.mark.parametrize("program", [two_lookups, heads_normed])
def test_more_rows_than_sms(program):
    require_right(program(7), seed=2, num_sms=3)


def test_norms_of_sums_over_ranks():
    """x + norm(f(x)), f being summed over two ranks, and a norm of the whole result."""
    program = PROGRAMS["post_norms"](3)
    split = {"gate": 0, "up": 0, "down": 1}
    marks = {t.name: replicate() for t in program.with_role("weight")}
    marks |= {f"{name}{i}.w": shard(dim, "tp") for name, dim in split.items() for i in range(2)}
    require_right(program, seed=4, marks=marks)


class RandomRows(Random):
    """As Random, with norms and softmax of what was made as values, alone or in a formula."""

    def result(self, x: Handle, width: int) -> Handle:
        if self.random.random() < 0.5:
            return super().result(x, width)
        y = self.random.choice(self.made)
        kind = self.random.choice(("rms", "layer", "softmax", "none"))
        like = [one for one in self.made if one.shape == y.shape]
        self.num += 1
        if kind == "none":
            return self.p.pointwise("a0 + tanh(a1)", *(self.random.choice(like) for _ in range(2)))
        if kind == "softmax":
            normed = self.p.softmax(y, name=f"s{self.num}")
        else:
            normed = (self.rms if kind == "rms" else self.layer_norm)(y, f"v{self.num}")
        if self.random.random() < 0.3:
            return normed
        return self.p.pointwise(self.random.choice(("a0 + a1", "a1 - a0 * 0.5")), normed, y)


def require_random(seeds: range) -> int:
    found = 0
    for seed in seeds:
        torch.manual_seed(seed)
        try:
            require_right(RandomRows(seed, "bf16").build(), seed, 3 + seed % 4)
        except UnsupportedError as refusal:
            print(seed, refusal)
            continue
        found += 1
    return found


def test_random_programs():
    assert require_random(range(4)) >= 3


@pytest.mark.nightly
def test_many_random_programs():
    assert require_random(range(4, 150)) >= 90
