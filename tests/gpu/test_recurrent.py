"""Decoders whose layers keep states that each token changes: their prompts, a token a pass, and
decode steps as CUDA graphs, with the numbers of single ops.
"""

import random
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn

from distmega.engine.engine import Engine
from distmega.engine.library_steps import LibrarySteps
from distmega.engine.requests import EngineOptions
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sources.load import open_model
from tests.models.files import save_tokenizer
from tests.torch_import.recurrent_families import RECURRENT

pytestmark = pytest.mark.gpu

VOCAB = 288
BATCH, NUM_PROMPT, NUM_DECODED = 3, 6, 4
WAITING = 1
"""Sequences that wait in every other step."""


def save_model(folder: Path, name: str) -> nn.Module:
    config = RECURRENT[name](random.Random(0))
    config.vocab_size = VOCAB
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    save_tokenizer(folder, VOCAB)
    return model.cuda()


def logits_of(folder: Path, texts: list[list[int]], *, captures: bool) -> Tensor:
    """Of the tokens behind each prompt, [sequences, NUM_DECODED, vocab], the last sequences a token
    behind after each step in which they wait.
    """
    mesh = DeviceMesh(tp=1)
    options = EngineOptions(max_context=32, batch=BATCH)
    source, comm = open_model(folder), SingleCommunicator(mesh)
    engine = Engine(source, mesh, comm, options, device="cuda:0", logits="last")
    steps, prefills = engine._decode.runner, engine._prefills
    assert isinstance(steps, LibrarySteps)
    assert engine.stepping is None, "no step runs ahead"
    steps._captures = prefills._captures = captures
    engine.prefill_all([ids[:NUM_PROMPT] for ids in texts])
    found: list[list[Tensor]] = [[] for _ in texts]
    for step in range(2 * NUM_DECODED):
        num = BATCH - WAITING * (step % 2)
        given = [
            (ids + [0] * NUM_DECODED)[NUM_PROMPT + len(rows)]
            for ids, rows in zip(texts, found, strict=True)
        ]
        scores = engine.decode_step(given[:num])["logits"]
        for slot in range(num):
            found[slot].append(scores[slot].float().clone())
    assert (steps._graph is not None) == captures
    assert any(program.graph for program in prefills._programs.values()) == captures
    return torch.stack([torch.stack(rows[:NUM_DECODED]) for rows in found])


@pytest.mark.parametrize(
    "name",
    [
        "mamba2",
        "lfm2",
        *(
            pytest.param(each, marks=pytest.mark.nightly)
            for each in ("mamba", "jamba", "qwen3_next")
        ),
    ],
)
def test_graphs_give_the_numbers_of_single_ops(name: str, tmp_path: Path):
    model = save_model(tmp_path, name)
    texts = torch.randint(3, VOCAB, (BATCH, NUM_PROMPT + NUM_DECODED)).tolist()
    found = logits_of(tmp_path, texts, captures=True)
    assert torch.equal(found, logits_of(tmp_path, texts, captures=False))
    ids = torch.tensor(texts, device="cuda")
    with torch.no_grad():
        exact = model(ids).logits[:, NUM_PROMPT:].float()
        halves = model.bfloat16()(ids).logits[:, NUM_PROMPT:].float()
    size = exact.norm(dim=-1)
    error, limit = ((each - exact).norm(dim=-1) / size for each in (found, halves))
    assert float(error.max()) < 2 * float(limit.max()) + 1e-2
