"""Decode steps of more than 16 sequences on one GPU, by a graph of library ops or the kernel."""

import pytest
import torch
from torch import Tensor

from distmega.engine.engine import Engine
from distmega.engine.requests import MAX_KERNEL_ROWS, EngineOptions
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.hostir.library import ops as library
from distmega.kernels.library.heads import append
from distmega.kernels.library.row_attention import attend_each
from distmega.program.ops.attention import append_values
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sources.load import open_model
from tests.gpu.reference import reference_logits
from tests.gpu.test_decode import random_ids, relative_error
from tests.gpu.test_row_programs import check
from tests.kernels.row_programs import PROGRAMS

pytestmark = pytest.mark.gpu

WAYS = pytest.mark.parametrize("kernel_rows", [1, MAX_KERNEL_ROWS], ids=["graph", "kernel"])


def open_many(name: str, batch: int, kernel_rows: int) -> Engine:
    """An engine of so many sequences, by the kernel or by a graph of library ops."""
    mesh = DeviceMesh(tp=1)
    options = EngineOptions(max_context=1024, batch=batch, kernel_rows=kernel_rows)
    comm = SingleCommunicator(mesh)
    engine = Engine(open_model(name), mesh, comm, options, device="cuda:0", logits="last")
    assert engine.uses_megakernel == (kernel_rows > 1)
    return engine


def steps(engine: Engine, sequences: list[list[int]], num: int) -> Tensor:
    """Logits of the last `num` tokens of each sequence, [sequences, num, vocab]."""
    engine.prefill_all([ids[:-num] for ids in sequences])
    each = zip(*(ids[-num:] for ids in sequences), strict=True)
    return torch.stack([engine.decode_step(tokens)["logits"].clone() for tokens in each], 1)


@WAYS
@pytest.mark.parametrize(
    ("name", "batch"), [("smollm2-135m", 33), ("llama-3.2-1b", 64), ("qwen3-0.6b", 20)]
)
def test_some_sequences_equal_transformers(name: str, batch: int, kernel_rows: int):
    engine = open_many(name, batch, kernel_rows)
    vocab = engine.decode_plan.config.vocab
    sequences = [random_ids(vocab, 4 + (131 * slot + 70) % 400) for slot in range(batch)]
    found = steps(engine, sequences, 3)
    for slot in (0, 15, 16, batch - 1):
        ids = sequences[slot]
        exact = reference_logits(engine, ids, torch.float32)[-3:]
        halves = reference_logits(engine, ids, torch.bfloat16)[-3:]
        error, limit = relative_error(found[slot].float(), exact), relative_error(halves, exact)
        assert error < 1.5 * limit + 1e-3, (slot, len(ids), error, limit)


@WAYS
@pytest.mark.parametrize("batch", [17, 64])
def test_several_steps_ahead_equal_single_steps(batch: int, kernel_rows: int):
    engine = open_many("smollm2-135m", batch, kernel_rows)
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


@pytest.mark.parametrize("rows", [17, 32, 64])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_many_rows_is_one_launch(name: str, rows: int):
    check(PROGRAMS[name](rows))


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize(
    ("batch", "dim", "group"), [(1, 128, 4), (33, 64, 4), (20, 96, 3), (17, 256, 2)]
)
def test_attention_of_a_row_each_is_torchs(
    batch: int, dim: int, group: int, window: int, softcap: float
):
    torch.manual_seed(0)
    heads, context = 4, 1000
    q = torch.randn(batch, heads, group, dim, device="cuda").bfloat16()
    caches = [torch.randn(batch, heads, context, dim, device="cuda").bfloat16() for _ in "kv"]
    positions = torch.randint(0, context, (batch,), device="cuda")
    found = attend_each(q, *caches, positions, dim**-0.5, window, softcap)
    exact = (q.double(), *(cache.double() for cache in caches))
    expected = library.masked_attention(*exact, positions, dim**-0.5, window, softcap)
    torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=4e-3)


def test_a_row_is_appended_to_its_cache():
    x = torch.randn(33, 3, 64, device="cuda").bfloat16()
    positions = torch.randint(0, 200, (33,), device="cuda")
    cache = torch.zeros(33, 3, 200, 64, device="cuda").bfloat16()
    assert torch.equal(
        append(cache.clone(), x, positions), append_values(cache.clone(), x, positions)
    )
