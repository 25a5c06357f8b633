"""Every argument of every method of ProgramBuilder: refused by a ProgramError unless it is what the
annotation says; what is built prints and parses back.
"""

from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch

from distmega.program.builder import Handle, ProgramBuilder
from distmega.program.text import parse_program, print_program
from tests.odd_values import wrongly_taken

WHOLE = int | np.integer | torch.Tensor
"""Dims and counts may be anything that Python counts by."""
SHAPES = {
    "x": (4, 8), "ids": (4,), "q": (4, 1, 2, 8), "rows": (1, 2, 4, 8), "keys": (1, 2, 8, 8),
    "heads": (4, 2, 8), "row": (4, 1, 8), "settings": (4, 3), "limits": (4, 2), "choice": (4, 2),
    "columns": (4, 3), "w": (6, 8), "g": (8,), "table": (10, 8), "angles": (16, 8),
    "experts": (3, 6, 8), "cache": (1, 16, 8),
}  # fmt: skip
WHOLE_NUMBERS = ("ids", "choice", "columns")
STATES = ("cache",)

CASES: dict[str, dict[str, Any]] = {
    "linear": {"x": "x", "w": "w", "bias": None, "spec": ""},
    "reduce": {"x": "x", "dim": 1, "combine": "sum"},
    "rms_norm": {"x": "x", "weight": "g", "eps": 1e-5},
    "layer_norm": {"x": "x", "weight": "g", "bias": None, "eps": 1e-5},
    "softmax": {"x": "x"},
    "rope": {"x": "heads", "positions": "ids", "table": "angles"},
    "kv_append": {"cache": "cache", "x": "row", "positions": "ids", "sequences": None},
    "attention": {
        "q": "q", "k": "cache", "v": "cache", "positions": "ids", "scale": 1.0, "window": 0,
        "in_order": False, "packed": None, "softcap": 0.0,
    },
    "attend": {"q": "rows", "k": "keys", "v": "keys", "mask": None, "scale": 1.0, "softcap": 0.0},
    "gather": {"x": "x", "ids": "columns", "dim": 1},
    "topk": {"x": "x", "num_top": 2},
    "top": {"x": "x", "num_top": 2},
    "top_k": {"x": "x", "num": 2, "weights": "softmax"},
    "argmax": {"x": "x"},
    "cumsum": {"x": "x"},
    "cutoff": {"x": "x", "settings": "settings"},
    "sample": {"x": "x", "limits": "limits", "seeds": "ids", "positions": "ids"},
    "embedding": {"ids": "ids", "table": "table"},
    "expand": {"x": "x", "shape": (3, 4, 8)},
    "transpose": {"x": "x", "order": (1, 0), "view": False},
    "reshape": {"x": "x", "shape": (8, 4), "view": False},
    "slice": {"x": "x", "dim": 0, "start": 0, "stop": 2, "step": 1, "view": False},
    "set": {"x": "x", "into": None},
    "route": {"ids": "choice", "num_groups": 3, "num_rows": None},
    "concat": {"xs": ["x", "x"], "dim": 0},
    "opaque": {
        "target": "aten.relu.default", "call": "{}", "operands": ["x"],
        "results": [((4, 8), "f32")], "host_reads": "",
    },
    "is_view": {"x": "x"},
    "value_of": {"chosen": "x"},
}  # fmt: skip


def declared() -> tuple[ProgramBuilder, dict[str, Handle]]:
    p = ProgramBuilder("p")
    return p, {
        name: (p.state if name in STATES else p.input)(
            name, shape, "i64" if name in WHOLE_NUMBERS else "f32"
        )
        for name, shape in SHAPES.items()
    }


def build(kind: str, **given: Any) -> None:
    """A program of one op; names of operands are those of SHAPES."""
    p, handles = declared()

    def meant(value: Any) -> Any:
        if type(value) is list and value and type(value[0]) is str and value[0] in handles:
            return [handles[each] for each in value]
        return handles[value] if type(value) is str and value in handles else value

    found = getattr(p, kind)(**{name: meant(value) for name, value in given.items()})
    made = found if isinstance(found, tuple) else (found,)
    program = p.build(*(each for each in made if isinstance(each, Handle)))
    assert parse_program(print_program(program)) == program


def hints_of(method: Callable[..., Any]) -> dict[str, Any]:
    wider = {int: WHOLE, Sequence[int]: list[WHOLE] | torch.Size, Sequence[Handle]: list[Handle]}
    hints = {name: wider.get(hint, hint) for name, hint in get_type_hints(method).items()}
    return hints | {"results": ()}


@pytest.mark.parametrize("kind", CASES)
def test_operands_and_numbers_are_of_their_types(kind: str) -> None:
    if kind != "value_of":  # of x, which nothing chose
        build(kind, **CASES[kind])
    named = CASES[kind] if kind in ("is_view", "value_of") else {**CASES[kind], "name": ""}
    hints = hints_of(getattr(ProgramBuilder, kind))
    assert not [*wrongly_taken(lambda **given: build(kind, **given), named, hints)]


@pytest.mark.parametrize("role", ["input", "weight", "state"])
def test_declarations_are_of_their_types(role: str) -> None:
    def declare(**given: Any) -> None:
        p = ProgramBuilder("p")
        p.build(getattr(p, role)(**given).map("a0", name="y"))

    hints = {"name": str, "shape": list | tuple, "dtype": str | torch.dtype}
    given = {"name": "x", "shape": (2,), "dtype": "f32"}
    assert not [*wrongly_taken(declare, given, hints)]


def test_expressions_and_names_are_texts() -> None:
    def program(name: Any = "p", text: Any = "a0", dtype: Any = "") -> None:
        p = ProgramBuilder(name)
        found = p.build(p.pointwise(text, p.input("x", (2,)), dtype=dtype))
        assert parse_program(print_program(found)) == found

    given = {"name": "p", "text": "a0", "dtype": ""}
    hints = {"name": str, "text": (), "dtype": str | torch.dtype}
    assert not [*wrongly_taken(program, given, hints)]
