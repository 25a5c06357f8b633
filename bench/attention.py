"""Attention of packed prompts alone, beside torch's: TFLOP/s of the causal half, one GPU.

    python -m bench.attention ["128 32 8: 16 x 448" ...]

A case is a head dim, query heads, key heads, and sequences of so many tokens. In turns, as CUDA
graphs, on GPU events: this package's two kernels, torch's SDPA by cuDNN and by FlashAttention on
whole sequences, and its FlashAttention of packed ones. Nothing is written.
"""

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.options import read_options
from bench.timing import alternating_us, captured
from distmega.kernels.library.packed_attention import attend_by_groups, attend_by_tiles

CASES = (
    *(f"128 32 8: 1 x {tokens}" for tokens in (512, 2048, 8192, 16384)),
    "128 32 8: 16 x 128", "128 32 8: 16 x 448", "128 16 4: 16 x 448", "128 16 4: 1 x 2048",
    "128 32 8: 2 x 4096", *(f"64 32 8: 1 x {tokens}" for tokens in (512, 2048, 8192, 16384)),
    "64 32 8: 16 x 128", "64 32 8: 16 x 448", "64 32 8: 2 x 4096",
)  # fmt: skip
ROUNDS = 11
SLEEP_CYCLES = 200_000


@dataclass(frozen=True, slots=True)
class Case:
    """What a case's name says."""

    text: str
    dim: int
    heads: int
    kv_heads: int
    batch: int
    num_tokens: int


def parse_case(text: str) -> Case:
    """Reads "DIM HEADS KV_HEADS: BATCH x TOKENS"."""
    number = r"([1-9]\d*)"
    found = re.fullmatch(f"{number} {number} {number}: {number} x {number}", text)
    if not found:
        form = "DIM HEADS KV_HEADS: BATCH x TOKENS"
        raise SystemExit(f"case {text!r}; expected '{form}', each at least 1; correct it")
    return Case(text, *map(int, found.groups()))


def flops(case: Case) -> float:
    """Of both products, of the causal half."""
    return 2.0 * case.batch * case.num_tokens**2 * case.heads * case.dim


def make_calls(case: Case) -> dict[str, Callable[[], Tensor]]:
    """Each gives [batch * tokens, heads, dim], torch's SDPA [batch, heads, tokens, dim]."""
    batch, tokens, dim, kv_heads = case.batch, case.num_tokens, case.dim, case.kv_heads
    group, scale, device = case.heads // kv_heads, dim**-0.5, torch.device("cuda")
    num_rows = batch * tokens
    options = {"device": device, "dtype": torch.bfloat16}
    q = torch.randn(num_rows, kv_heads, group, dim, **options)  # type: ignore[call-overload]
    caches = [
        torch.randn(batch, kv_heads, tokens + 64, dim, **options)  # type: ignore[call-overload]
        for _ in range(2)
    ]
    positions = torch.arange(tokens, device=device).repeat(batch)
    starts = torch.arange(batch + 1, device=device) * tokens
    given = q, *caches, positions, starts, scale
    rows = q.view(batch, tokens, case.heads, dim).transpose(1, 2)
    keys, values = (cache[:, :, :tokens].contiguous() for cache in caches)
    flat = [x.transpose(1, 2).reshape(num_rows, kv_heads, dim) for x in (keys, values)]
    lengths = starts.to(torch.int32)

    def sdpa(backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                rows, keys, values, is_causal=True, enable_gqa=group > 1
            )

    def packed_flash() -> Tensor:
        found: Tensor = torch.ops.aten._flash_attention_forward(
            q.view(num_rows, case.heads, dim), *flat, lengths, lengths, tokens, tokens, 0.0, True,
            False,
        )[0]  # fmt: skip
        return found

    return {
        "tiles": partial(attend_by_tiles, *given),
        "groups": partial(attend_by_groups, *given),
        "cuDNN": partial(sdpa, SDPBackend.CUDNN_ATTENTION),
        "flash": partial(sdpa, SDPBackend.FLASH_ATTENTION),
        "packed flash": packed_flash,
    }


def measure(case: Case) -> str:
    """A row of the table."""
    torch.manual_seed(0)
    replays: dict[str, Callable[[], object]] = {}
    found: dict[str, Tensor] = {}
    graphs = []
    calls = make_calls(case)  # kept until the end: replays read what they were given
    for name, call in calls.items():
        try:
            graph, out = captured(call)
        except RuntimeError as error:
            print(f"{case.text}: no {name}: {str(error).splitlines()[0]}", flush=True)
            continue
        graphs.append(graph)
        replays[name] = graph.replay
        graph.replay()
        if name in ("cuDNN", "flash"):
            out = out.transpose(1, 2)
        found[name] = out.reshape(-1, case.heads, case.dim).float()
    expected = found["tiles"]
    far = max(float((x - expected).norm() / expected.norm()) for x in found.values())
    times = alternating_us(replays, ROUNDS, lambda: torch.cuda._sleep(SLEEP_CYCLES))
    rates = "  ".join(f"{n} {flops(case) / us * 1e-6:.0f} ({us:.0f})" for n, us in times.items())
    return f"{case.text:22} TFLOP/s (us): {rates}; furthest {far:.4f}"


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=CASES)
    for case in map(parse_case, read_options(parser).cases):
        print(measure(case), flush=True)


if __name__ == "__main__":
    main()
