"""Masks of captured attention over caches: those by which a token sees what lies behind it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from distmega.errors import CaptureError
from distmega.torch_import.conversion import convert
from distmega.torch_import.exported import export_module
from distmega.torch_import.huggingface.masks import check_masks
from distmega.torch_import.operators import custom_ops

NUM, WIDTH = 12, 4
Seen = Callable[[Tensor, Tensor], Tensor]
"""Which cache rows [t] a token at a position [m, 1] may look at."""


class Attention(nn.Module):
    """Two heads that look at themselves over a cache. form: how scores are masked."""

    def __init__(self, seen: Seen, form: str) -> None:
        super().__init__()
        self.seen, self.form = seen, form
        self.register_buffer("cache", torch.zeros(2, NUM, WIDTH))
        self.embedding = nn.Parameter(torch.randn(NUM, 2, WIDTH))

    def forward(self, tokens: Tensor, positions: Tensor, sequences: Tensor | None = None) -> Tensor:
        x = self.embedding[tokens]
        buffer = self.get_buffer("cache")
        new = custom_ops.append_rows(buffer, x, positions)
        buffer.copy_(new)
        seen = self.seen(torch.arange(NUM), positions[:, None])
        query = x.transpose(0, 1)
        if self.form == "attend":
            mask = seen[None, None]
            return custom_ops.attend(query[None], new[None], new[None], mask, 0.5, 0.0)
        scores = query @ new.transpose(1, 2) * 0.5
        if self.form == "added":
            scores = scores + torch.where(seen, 0.0, torch.finfo().min)
        elif self.form == "biased":
            scores = scores + 0.1 * torch.arange(NUM)
            scores = torch.tanh(scores).masked_fill(~seen, -1e4)
        else:
            scores = torch.where(seen, scores, -torch.inf)
        out: Tensor = scores.float().softmax(-1) @ new
        return out


def check(seen: Seen, form: str, num_rows: int) -> None:
    """Of a decode step's rows, or a prompt's where they are several."""
    given = {name: torch.zeros(num_rows, dtype=torch.long) for name in ("tokens", "positions")}
    if num_rows > 1:
        given["sequences"] = torch.zeros(num_rows, dtype=torch.long)
    graph = convert(export_module(Attention(seen, form), (), given), "attention")
    check_masks(graph.program, graph.constants, NUM)


RIGHT: dict[str, Seen] = {
    "all before": lambda there, here: there <= here,
    "a window": lambda there, here: (there <= here) & (there > here - 3),
}
WRONG: dict[str, Seen] = {
    "the whole cache": lambda there, here: (there < NUM) & (here >= 0),
    "one behind": lambda there, here: there <= here + 1,
}


EVERY = [(form, num) for form in ("attend", "added", "biased", "chosen") for num in (1, 5)]
FIRST = (("attend", 1), ("biased", 5))


@pytest.mark.parametrize(
    ("form", "num_rows"),
    [pytest.param(*case, marks=[] if case in FIRST else [pytest.mark.nightly]) for case in EVERY],
)
def test_only_masks_that_hide_what_lies_behind_a_token_pass(form: str, num_rows: int):
    for seen in RIGHT.values():
        check(seen, form, num_rows)
    for seen in WRONG.values():
        with pytest.raises(CaptureError, match=r"of 12 rows of a cache, .* lie behind them"):
            check(seen, form, num_rows)
