"""Prompts share programs, of which the rows behind a prompt are filled up."""

from dataclasses import replace
from unittest.mock import Mock, patch

import pytest
import torch

from distmega.engine.decode_planner import lower_decode, plan_decode
from distmega.engine.engine import Engine
from distmega.engine.prefill import Prefills
from distmega.engine.prefill_plan import prefill_size
from distmega.engine.requests import EngineOptions
from distmega.errors import RequestError
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.hostir.ir.nodes import LibraryOp
from distmega.hostir.run.early_reads import reads_constants_early, reads_states_early
from distmega.hostir.run.evaluator import Evaluator
from distmega.kernels.machines import H200
from distmega.models.presets import PRESETS
from distmega.models.sampling import MOST_LIKELY, Sampling
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sources.load import open_model

CONTEXT = 48
SAMPLED = Sampling(temperature=1.0, top_k=20, top_p=0.9, seed=3)


def open_tiny(sampling: Sampling = MOST_LIKELY, batch: int = 1) -> Engine:
    mesh, options = DeviceMesh(tp=1), EngineOptions(max_context=CONTEXT, num_sms=3, batch=batch)
    comm = SingleCommunicator(mesh)
    return Engine(open_model("tiny-qwen3"), mesh, comm, options, sampling=sampling)


def prompt_of(num_tokens: int) -> list[int]:
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randint(0, 288, (num_tokens,), generator=generator).tolist()


def test_programs_that_ran_last_are_kept(monkeypatch: pytest.MonkeyPatch):
    """On a CPU each number of tokens has one of its own."""
    monkeypatch.setattr("distmega.engine.prefill.MOST_PROGRAMS", 2)
    engine = open_tiny()
    tokens = [engine.prefill(prompt_of(num)) for num in (1, 2, 1, 3)]
    assert [size for size, *_ in engine._prefills._programs] == [1, 3]
    assert engine.prefill(prompt_of(2)) == tokens[1]


@pytest.mark.parametrize("sampling", [MOST_LIKELY, SAMPLED])
@pytest.mark.parametrize("batch", [1, 2])
def test_filled_up_prompts_give_the_tokens_of_exact_ones(sampling: Sampling, batch: int):
    exact, filled = open_tiny(sampling, batch), open_tiny(sampling, batch)
    slot = batch - 1
    for one in (exact, filled):
        for before in range(slot):
            one.prefill([0], before)
    with patch(
        "distmega.engine.prefill.prefill_size",
        lambda decode_plan, num, most: min(16 * -(-num // 16), most),
    ):
        for num_tokens in (1, 5, 16, 47):
            ids = prompt_of(num_tokens)
            found, wanted = filled.prefill(ids, slot), exact.prefill(ids, slot)
            assert found == wanted, num_tokens
            if num_tokens < CONTEXT:
                steps = [one.decode_step([0] * slot + [wanted]) for one in (filled, exact)]
                assert steps[0]["next"][slot] == steps[1]["next"][slot]
        logits = filled.logits(prompt_of(5))
        assert len(filled._prefills._programs) == batch + 2
    torch.testing.assert_close(logits, exact.logits(prompt_of(5)))
    assert logits.shape[0] == 5


def test_prompts_read_weights_early_and_no_states(monkeypatch: pytest.MonkeyPatch):
    """What copies a prompt's rows, which a graph holds too, may write what their kernels read."""
    told: list[tuple[bool, bool]] = []
    run = Evaluator.run

    def noting(self: Evaluator, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        told.append((reads_constants_early(), reads_states_early()))
        return run(self, given)

    monkeypatch.setattr(Evaluator, "run", noting)
    engine = open_tiny()
    engine.prefill(prompt_of(5))
    assert told == [(True, False)]
    first, *_ = engine._prefills._programs.values()
    ops = [node.op.kind for node in first.evaluator.host.body if isinstance(node, LibraryOp)]
    assert ops[0] == "embedding", "no kernel that starts early"


def test_sizes_are_few_and_hold_the_prompt():
    decode_plan = open_tiny().decode_plan
    assert [prefill_size(decode_plan, num, CONTEXT) for num in (1, 17, 40)] == [1, 17, 40]
    with patch("distmega.engine.prefill_plan.CPU", None):
        assert [prefill_size(decode_plan, num, CONTEXT) for num in (1, 17, 48)] == [1, 17, 48]
        sizes = {num: prefill_size(decode_plan, num, 8192) for num in range(1, 8193)}
    assert all(num <= size <= max(1.125 * num + 1, num + 63) for num, size in sizes.items())
    assert (sizes[64], sizes[65], sizes[1025], sizes[5000]) == (64, 128, 1152, 5120)
    assert len(set(sizes.values())) == 16 + 8 * 3


def test_passes_of_several_ranks_are_filled_up_for_kernels_with_collectives_beside_them():
    config = replace(PRESETS["qwen3-8b"], num_layers=1)
    options = EngineOptions(max_context=8192)
    staged = plan_decode(config, DeviceMesh(tp=4), H200, options)
    beside = lower_decode(config, staged, options, peer_memory=True)
    apart = replace(beside, peer_memory=False)
    num_tokens = (1024, 1600, 1700, 2048, 2100, 3600, 8000)
    sizes = [prefill_size(beside, num, 8192) for num in num_tokens]
    assert sizes == [1024, 1664, 2048, 2048, 2560, 4096, 8192]
    plain = [prefill_size(apart, num, 8192) for num in num_tokens]
    assert plain == [1024, 1664, 1792, 2048, 2304, 3840, 8192]
    assert prefill_size(beside, 1700, 2000) == 1792, "where caches have no room for more"
    assert prefill_size(beside, 1700, 1750) == 1700


@pytest.mark.parametrize(("micro_batches", "captures"), [(0, True), (1, True), (2, False)])
def test_prompts_in_micro_batches_do_not_become_graphs(micro_batches: int, captures: bool):
    engine = open_tiny()
    options = replace(engine.decode_plan.options, micro_batches=micro_batches)
    decode_plan = replace(engine.decode_plan, options=options)
    found = Prefills(decode_plan, Mock(), engine.comm, torch.device("cuda"))
    assert found._captures == captures


def test_prompts_may_be_rows_of_an_array_and_limits_any_number():
    rows = torch.tensor([prompt_of(4), prompt_of(5)[:4]])
    engine = open_tiny(batch=2)
    wanted = engine.prefill_all(rows.tolist())
    assert engine.prefill_all(rows) == engine.prefill_all(rows.numpy()) == wanted
    listed = [*engine.generate_all(rows.tolist(), limit=3)]
    assert [*engine.generate_all(rows, limit=3)] == listed
    assert len([*engine.generate_all(rows, limit=2**63 - 1)]) == CONTEXT - 4 + 1
    with pytest.raises(RequestError, match="expected the tokens of each prompt in a list"):
        engine.prefill_all(rows[0])  # type: ignore[arg-type]
