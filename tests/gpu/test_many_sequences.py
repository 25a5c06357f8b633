"""Decode steps of more than 16 sequences on one GPU, each as transformers has it alone."""

import pytest
import torch

from distmega.engine.engine import Engine
from distmega.engine.requests import EngineOptions
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.hostir.library import ops as library
from distmega.kernels.library.heads import append
from distmega.kernels.library.row_attention import attend_each
from distmega.program.ops.attention import append_values
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sources.load import open_model
from tests.gpu.test_batch import require_transformers_logits
from tests.gpu.test_decode import random_ids

pytestmark = pytest.mark.gpu


def open_many(name: str, batch: int, max_context: int = 1024) -> Engine:
    """An engine of so many sequences, by whatever decodes them."""
    mesh, options = DeviceMesh(tp=1), EngineOptions(max_context=max_context, batch=batch)
    comm = SingleCommunicator(mesh)
    return Engine(open_model(name), mesh, comm, options, device="cuda:0", logits="last")


@pytest.mark.parametrize("name", ["smollm2-135m", "llama-3.2-1b", "qwen3-0.6b"])
def test_each_sequence_equals_transformers(name: str):
    engine = open_many(name, 33)
    require_transformers_logits(engine, [1 + (131 * slot + 700) % 997 for slot in range(33)])


@pytest.mark.parametrize("batch", [17, 64])
def test_several_steps_ahead_equal_single_steps(batch: int):
    engine = open_many("smollm2-135m", batch)
    num = batch - 1
    vocab = engine.decode_plan.config.vocab
    prompts = [random_ids(vocab, 1 + (131 * n) % 300) for n in range(num)]
    stepwise = engine.generate_all(prompts, ignore_eos=True)
    together = [next(stepwise) for _ in range(20)]
    assert engine.stepping is not None
    tokens = tuple(engine.prefill_all(prompts))
    assert tokens == together[0]
    for expected in together[1:]:
        tokens = tuple(engine.decode_step(tokens)["next"].tolist())[:num]
        assert tokens == expected


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize(("batch", "dim", "group"), [(1, 128, 4), (33, 64, 4), (20, 96, 3)])
def test_attention_of_a_row_each_is_torchs(batch: int, dim: int, group: int, window: int):
    torch.manual_seed(0)
    heads, context = 4, 1000
    q = torch.randn(batch, heads, group, dim, device="cuda").bfloat16()
    caches = [torch.randn(batch, heads, context, dim, device="cuda").bfloat16() for _ in "kv"]
    positions = torch.randint(0, context, (batch,), device="cuda")
    found = attend_each(q, *caches, positions, dim**-0.5, window)
    exact = (q.double(), *(cache.double() for cache in caches))
    expected = library.masked_attention(*exact, positions, dim**-0.5, window)
    torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=4e-3)


def test_a_row_is_appended_to_its_cache():
    x = torch.randn(33, 3, 64, device="cuda").bfloat16()
    positions = torch.randint(0, 200, (33,), device="cuda")
    cache = torch.zeros(33, 3, 200, 64, device="cuda").bfloat16()
    assert torch.equal(
        append(cache.clone(), x, positions), append_values(cache.clone(), x, positions)
    )
