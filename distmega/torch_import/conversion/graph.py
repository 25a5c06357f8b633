"""Graph: a program, and what its tensors were in torch.

In: what converter.py and the files beside it find. Out: types that ../captured.py binds to tensors
of a call.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from distmega.program.builder import Handle, ProgramBuilder
from distmega.program.types import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A program, and where its tensors come from.

    inputs: in the order of the module's flat inputs, None for one that is no tensor or has no
    elements; one of a type that programs lack comes as `hold` gives it. outputs: of the module's
    flat outputs, Output, Shared, Empty, Late, or a value that is always the same. targets: weight
    or state -> parameter or buffer of the module. constants: weights known at capture. updated:
    output -> input that the module overwrites. opaque: operators that torch runs, and how often.
    ending: what torch runs behind the program, for results that have no shape before.
    """

    program: Program
    inputs: tuple[str | None, ...]
    outputs: tuple[object, ...]
    targets: Mapping[str, str]
    constants: Mapping[str, torch.Tensor]
    updated: Mapping[str, str]
    opaque: Counter[str]
    ending: "Ending | None" = None


Views = tuple[tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], ...]
"""What leads from a tensor to a view of it: a function of the tensor and further arguments each."""


@dataclass(frozen=True, slots=True)
class Output:
    """A result of the module that is a tensor of the program, or a view of it. dtype: torch's name
    of its element type, where programs lack it. is_number: the module gives what it holds as a
    number. views: what leads from the tensor to the result; results of one name share its memory.
    """

    name: str
    dtype: str = ""
    is_number: bool = False
    views: Views = ()


@dataclass(frozen=True, slots=True)
class Late:
    """A result of the module that the graph's ending gives. position: among what that gives."""

    position: int


@dataclass(frozen=True, slots=True)
class Ending:
    """Operators that torch runs behind a program. call: as encode_graph gives it. operands: names
    of what it reads, the program's inputs as they came, its weights, and outputs.
    """

    call: str
    operands: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Shared:
    """A result of the module that lies in the memory of an input or a weight, as a view of it or
    the tensor itself. source: the input's position among the flat ones, or the weight's name.
    """

    source: int | str
    views: Views


@dataclass(frozen=True, slots=True)
class Empty:
    """A result of the module without elements or, where the module puts it on meta, values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_meta: bool = False


Continue = Callable[[ProgramBuilder, Mapping[str, Handle], Sequence[Handle]], Sequence[Handle]]
"""More ops, given the inputs by name and the module's results; gives the program's outputs."""
