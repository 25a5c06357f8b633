"""The decode kernel's machine code for sm_90a, compiled without a GPU by the code that launches it.

Its registers are what all branches together need, so one model of each kind is enough.
"""

from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from distmega.blueprint import draw_decode, plan_decode
from distmega.kernels.hopper.runner import DecodeRunner
from distmega.models.presets import PRESETS
from distmega.requests import EngineOptions
from distmega.sharding.cost import H200
from distmega.sharding.mesh import DeviceMesh
from tests.kernels.offline import offline
from tests.kernels.ptx import WAIT, bare_signals, loads, plain_spins
from tests.kernels.sm90 import REGISTERS, SHARED_BYTES, Machine

MODELS = (
    ("llama-3.2-1b", 1, False),
    ("qwen3-0.6b", 1, False),
    ("smollm2-135m", 1, True),
    ("llama-3.2-1b", 2, False),
    ("qwen3-8b", 4, False),
)
"""Heads of 64; of 128, with q and k norms; traced; one of several ranks."""
SPILLED_BYTES = 32
"""With several ranks and q and k norms: scalars that a task reads back once."""
LOADER_WARPS, LOADER_REGISTERS = 1, 40


@dataclass(frozen=True, slots=True)
class _Team:
    """The first of `size` ranks that share nothing: what is compiled does not run."""

    size: int
    place: int = 0

    def open(self, num_bytes: int) -> SimpleNamespace:
        words = torch.zeros(num_bytes // 8, dtype=torch.int64)
        return SimpleNamespace(tensor=lambda place, shape, dtype: words)


def open_runner(name: str, num_ranks: int) -> DecodeRunner:
    """A preset's runner, to be used within `offline`."""
    options = EngineOptions(max_context=256)
    plan = plan_decode(PRESETS[name], DeviceMesh(tp=num_ranks), H200, options, "none")
    drawn = draw_decode(PRESETS[name], plan, options, peer_memory=True)
    (segment,) = drawn.host.segments
    return DecodeRunner(
        segment,
        weights=drawn.weights,
        weights_arena=torch.empty(drawn.weights.num_bytes, dtype=torch.uint8),
        states=drawn.states,
        state_arena=torch.empty(drawn.states.num_bytes, dtype=torch.uint8),
        team=_Team(num_ranks) if num_ranks > 1 else None,
    )


@cache
def decode_code(name: str, num_ranks: int, trace: bool) -> Machine:
    with pytest.MonkeyPatch.context() as patch, offline(patch) as launched:
        runner = open_runner(name, num_ranks)
        if trace:
            runner.trace(1)
        else:
            runner.decode(1)
    (machine,) = launched
    return machine


@pytest.mark.parametrize(("name", "num_ranks", "trace"), MODELS)
def test_decode_fits_an_sm(name, num_ranks, trace):
    code = decode_code(name, num_ranks, trace)
    assert code.stack_bytes <= (SPILLED_BYTES if num_ranks > 1 else 0)
    assert code.shared_bytes <= SHARED_BYTES
    assert 32 * (8 * code.registers + LOADER_WARPS * LOADER_REGISTERS) <= REGISTERS


@pytest.mark.parametrize(("name", "num_ranks", "trace"), MODELS)
def test_decode_loads_by_tma_and_waits_in_order(name, num_ranks, trace):
    code = decode_code(name, num_ranks, trace)
    assert loads(code.ptx) >= 3
    assert WAIT in code.ptx
    assert "ld.relaxed" in code.ptx or "ld.acquire" in code.ptx
    assert ("ld.relaxed.sys" in code.ptx) == (num_ranks > 1)
    assert plain_spins(code.ptx) == []
    assert bare_signals(code.ptx) == []


def test_every_wait_for_a_word_is_bounded():
    """Each polling loop reads the clock that ends it; a kernel without stamps reads no other."""
    name = "llama-3.2-1b"
    ptx = decode_code(name, 1, False).ptx
    assert ptx.count("SPIN:") == ptx.count("%globaltimer") >= 4
