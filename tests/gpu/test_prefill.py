"""Prefill on one GPU: rotations by one kernel, short prompts as CUDA graphs."""

import pytest
import torch

from distmega.hostir.library import ops as library
from distmega.kernels.rope import rotate
from tests.gpu.engines import open_engine

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 3, 64), (130, 8, 4, 128), (77, 3, 3, 64), (5, 1, 1, 16)])
def test_rotations_are_those_of_torch(shape: tuple[int, ...], dtype: torch.dtype):
    torch.manual_seed(0)
    num_rows, dim = shape[0], shape[-1]
    whole = torch.randn(num_rows, *shape[1:-1], 2 * dim, device="cuda").to(dtype)
    table = torch.randn(200, dim, device="cuda")
    positions = torch.randperm(200, device="cuda")[:num_rows]
    for x in (whole[..., :dim].contiguous(), whole[..., dim:]):
        found, expected = rotate(x, positions, table), library.rope(x, positions, table)
        tolerance = 1e-5 if dtype == torch.float32 else 1.6e-2
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        assert found.is_contiguous()


def test_a_prompt_gives_the_same_token_in_a_graph():
    """Prompts of one size by a program, then by a graph, between prompts of other sizes."""
    engine = open_engine("llama-3.2-1b", max_context=2048)
    vocab = engine.blueprint.config.vocab
    generator = torch.Generator().manual_seed(0)
    sizes = 100, 128, 5, 97, 1500, 101, 60, 1400
    prompts = [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in sizes]
    graphs = engine._prefills._graphs
    first = [engine.prefill(prompt) for prompt in prompts]
    assert {size for size, _ in graphs} == {64, 128}
    for _ in range(2):
        assert [engine.prefill(prompt) for prompt in prompts] == first
    for prompt, token in zip(prompts, first, strict=True):
        logits = engine.logits(prompt)[-1]
        assert logits[token] >= logits.max() - 0.05 * logits.abs().max()
    reopened = open_engine("llama-3.2-1b", max_context=2048)
    assert [reopened.prefill(prompt) for prompt in prompts] == first
    torch._C._cuda_clearCublasWorkspaces()  # as torch.compile does
    torch.cuda.empty_cache()
    for one in (engine, reopened):
        one.prefill(prompts[0])
    steps = [one.decode_step([7])["logits"].clone() for one in (engine, reopened)]
    assert torch.equal(steps[0], steps[1])
