"""What a kind's definition says it computes, beside the quicker ways that torch has."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch

from distmega.hostir.library import ops as library
from distmega.program.kinds import kind_of
from distmega.program.ops import attention, data_movement, experts, norms
from distmega.program.ops import compute as ops
from distmega.program.ops.parts import Built
from distmega.program.types import Tensor
from tests.hostir.library.test_library import declared

Case = tuple[Callable[..., Built], list[torch.Tensor]]
"""What states an op, and its operands."""


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def caches(*rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of 2 heads and 9 positions."""
    return random(*rows, 2, 9, 4), random(*rows, 2, 9, 5)


def attending(*tensors: torch.Tensor, **options: float) -> Case:
    """Of rows 3 queries a head, at positions 4, 0, 7 and 2."""
    rows, at = random(4, 2, 3, 4), torch.tensor([4, 0, 7, 2])
    return lambda *xs: attention.attention("y", *xs, scale=0.3, **options), [rows, *tensors, at]


def packed(k: torch.Tensor, v: torch.Tensor) -> Case:
    """Two sequences of 3 rows and of one."""
    q, at = random(4, 2, 3, 4), torch.tensor([4, 5, 6, 2])
    sequences, starts = torch.tensor([0, 0, 0, 1]), torch.tensor([0, 3, 4])

    def state(q: Tensor, k: Tensor, v: Tensor, at: Tensor, *others: Tensor) -> Built:
        return attention.attention("y", q, k, v, at, scale=0.3, window=3, packed=others)

    return state, [q, k, v, at, sequences, starts]


def masked(*mask: torch.Tensor, softcap: float = 0.0) -> Case:
    """Of 6 queries over 3 heads; bool masks leave out rows, and one row whole."""

    def state(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Built:
        return attention.attend("y", q, k, v, seen, 0.3, softcap)

    return state, [random(2, 6, 5, 4), random(2, 3, 9, 4), random(2, 3, 9, 5), *mask]


MASK = torch.arange(45).reshape(1, 1, 5, 9) % 4 != 1
MASK[:, :, 3] = False
CASES: dict[str, Case] = {
    "linear": (partial(ops.linear, "y"), [random(3, 5), random(4, 5), random(4)]),
    "linear of moved axes": (
        partial(ops.linear, "y", spec="k b m j, b n k, b -> n m b"),
        [random(5, 2, 3, 2), random(2, 4, 5), random(2)],
    ),
    "linear of a scalar": (partial(ops.linear, "y", spec="k, k ->"), [random(5), random(5)]),
    "attention": attending(*caches()),
    "attention, window and softcap": attending(*caches(), window=3, softcap=2.0),
    "attention, caches of rows": attending(*caches(4), window=3),
    "attention, packed": packed(*caches(2)),
    "attention, wider caches": attending(*(x.double() for x in caches()), window=3),
    "attend": masked(),
    "attend, a wider mask": masked(random(2, 1, 5, 9).double()),
    "attend, bool mask": masked(MASK),
    "attend, added mask and softcap": masked(random(2, 1, 5, 9), softcap=2.0),
    "concat": (
        lambda *xs: data_movement.concat("y", xs, 1), [random(2, 3), random(2, 1), random(2, 4)]
    ),
    "rms norm": (partial(norms.rms_norm, "y", eps=0.1), [random(3, 6), random(6)]),
    "layer norm": (partial(norms.layer_norm, "y", eps=0.1), [random(3, 6), random(6), random(6)]),
    "softmax": (partial(norms.softmax, "y"), [random(3, 6)]),
    "grouped_linear": (
        partial(experts.grouped_linear, "y", rows=4),
        [random(7, 5), random(4, 3, 5), torch.tensor([0, 3, 3, 4, 7])],
    ),
}  # fmt: skip


@pytest.mark.parametrize("rows", [(), (4,)])
@pytest.mark.parametrize("of_keys", [torch.float32, torch.float64])
@pytest.mark.parametrize("of_bias", [torch.float32, torch.float64])
def test_biased_attention_is_attention_under_a_mask_of_numbers(
    rows: tuple[int, ...], of_keys: torch.dtype, of_bias: torch.dtype
):
    """A cache for all rows, and one each."""
    at, bias = torch.tensor([4, 0, 7, 2]), random(9, 2, 3).to(of_bias)
    k, v = caches(*rows)
    tensors = [random(4, 2, 3, 4), k.to(of_keys), v, at, bias]
    names = "q", "k", "v", "at", "bias"
    op, _ = attention.biased_attention(
        "y", *map(declared, names, tensors), scale=0.3, window=3, softcap=2.0
    )
    found = library.run_op(op, dict(zip(names, tensors, strict=True)), {})["y"]
    place = torch.arange(9)
    for row, here in enumerate(at):
        mask = bias.permute(1, 2, 0).masked_fill((place > here) | (place <= here - 3), -math.inf)
        keys, values = (x[row] if rows else x for x in tensors[1:3])
        heads = library.attend(
            tensors[0][row].reshape(1, 6, 1, 4), keys[None], values[None], mask.reshape(1, 6, 1, 9),
            0.3, 2.0,
        )  # fmt: skip
        torch.testing.assert_close(found[row].reshape(6, 5), heads.reshape(6, 5))


@pytest.mark.parametrize("name", CASES)
def test_quick_ways_of_torch_give_what_references_say(name: str):
    state, tensors = CASES[name]
    op, _ = state(*(declared(f"x{n}", x) for n, x in enumerate(tensors)))
    definition = kind_of(op)
    assert op.kind in library.QUICK
    assert definition.reference is not None
    by_name = {f"x{n}": x for n, x in enumerate(tensors)}
    operands = [by_name[read.tensor] for read in op.reads]
    found = definition.reference(op, {})(*operands)
    (quick,) = library.compile_op(op, {})(operands)
    assert found.shape == quick.shape
    torch.testing.assert_close(quick, found, rtol=1e-5, atol=1e-5)


def test_every_quick_way_is_compared_with_its_reference():
    compared = {name.split()[0].rstrip(",") for name in CASES}
    compared |= {f"{norm}_norm" for norm in ("rms", "layer")}
    assert {"fused_norm"} == set(library.QUICK) - compared
