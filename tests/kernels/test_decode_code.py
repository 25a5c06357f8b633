"""The decode kernel's machine code for sm_90a, compiled without a GPU by the code that launches it.

Its registers are what all branches together need, so one model of each kind is enough.
"""

from functools import cache

import pytest
import torch

from distmega.kernels.arena import Space, layout_arena
from distmega.kernels.hopper.runner import DecodeRunner
from distmega.kernels.hopper.weight_order import order_weights
from distmega.models.decoder import build_decoder
from distmega.models.presets import PRESETS
from tests.kernels.offline import offline
from tests.kernels.ptx import WAIT, bare_signals, loads, plain_spins
from tests.kernels.sm90 import REGISTERS, SHARED_BYTES, Machine

MODELS = {"llama-3.2-1b": False, "qwen3-0.6b": False, "smollm2-135m": True}
"""Heads of 64; of 128, with q and k norms; traced."""
LOADER_WARPS, LOADER_REGISTERS = 1, 40


@cache
def decode_code(name: str, trace: bool) -> Machine:
    program = build_decoder(PRESETS[name], 1, 256, dtype="bf16")
    weights = layout_arena(Space.WEIGHT, order_weights(program))
    states = layout_arena(Space.STATE, program.with_role("state"))
    with pytest.MonkeyPatch.context() as patch, offline(patch) as launched:
        runner = DecodeRunner(
            program,
            weights=weights,
            weights_arena=torch.empty(weights.num_bytes, dtype=torch.uint8),
            states=states,
            state_arena=torch.empty(states.num_bytes, dtype=torch.uint8),
        )
        if trace:
            runner.trace(1)
        else:
            runner.decode(1)
    (machine,) = launched
    return machine


@pytest.mark.parametrize(("name", "trace"), MODELS.items())
def test_decode_fits_an_sm(name, trace):
    code = decode_code(name, trace)
    assert code.stack_bytes == 0
    assert code.shared_bytes <= SHARED_BYTES
    assert 32 * (8 * code.registers + LOADER_WARPS * LOADER_REGISTERS) <= REGISTERS


@pytest.mark.parametrize(("name", "trace"), MODELS.items())
def test_decode_loads_by_tma_and_waits_in_order(name, trace):
    code = decode_code(name, trace)
    assert loads(code.ptx) >= 3
    assert WAIT in code.ptx
    assert "ld.relaxed" in code.ptx or "ld.acquire" in code.ptx
    assert plain_spins(code.ptx) == []
    assert bare_signals(code.ptx) == []


def test_every_wait_for_a_word_is_bounded():
    """Each polling loop reads the clock that ends it; a kernel without stamps reads no other."""
    name = "llama-3.2-1b"
    ptx = decode_code(name, MODELS[name]).ptx
    assert ptx.count("SPIN:") == ptx.count("%globaltimer") >= 4
