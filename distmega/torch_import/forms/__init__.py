"""Captured programs in the forms that the built-in decoders have: a program as torch wrote it in;
one with norms, rotations and products as single ops out, which planners and kernels know.

Start at `normalise`: the passes in their order. algebra.py compares values, elements.py follows
elements back, derived.py says what weights are computed of. Nothing here knows a model.
"""

from dataclasses import dataclass

import torch

from distmega.program.types import Program
from distmega.torch_import.forms.biases import state_biases
from distmega.torch_import.forms.chains import join_chains
from distmega.torch_import.forms.derived import Derived
from distmega.torch_import.forms.draft import Draft
from distmega.torch_import.forms.norms import state_norms
from distmega.torch_import.forms.products import fold_weights, orient_products, split_products
from distmega.torch_import.forms.rotations import state_rotations
from distmega.torch_import.forms.scales import choose_before, drop_stream_factors
from distmega.torch_import.forms.views import drop_front, flatten_views

__all__ = ["Derived", "Normal", "normalise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Normal:
    """A program in normal form. derived: weights that are computed of others as they are read;
    constants: those whose values are known, the ones that came and those that were made.
    """

    program: Program
    derived: dict[str, Derived]
    constants: dict[str, torch.Tensor]


def normalise(
    program: Program,
    constants: dict[str, torch.Tensor],
    positions: str,
    num_positions: int,
    *,
    keep_weights: bool = False,
) -> Normal:
    """The same program in normal form. positions: the input that holds them, [m]; num_positions:
    how many there are. keep_weights: without forms for which weights and caches are laid out anew,
    where programs that share them may differ in these.
    """
    draft, known = Draft.of(program), dict(constants)
    if not keep_weights:
        fold_weights(draft)
    state_norms(draft, known)
    if not keep_weights:
        orient_products(draft)
        split_products(draft)
        state_biases(draft, positions, num_positions, known)
        state_rotations(draft, positions, num_positions, known)
    drop_front(draft)
    flatten_views(draft)
    draft.prune()
    join_chains(draft)
    if not keep_weights:
        drop_stream_factors(draft)
    choose_before(draft)
    draft.name_outputs()
    found = draft.finish()
    weights = {tensor.name for tensor in found.with_role("weight")}
    kept = {name: x for name, x in known.items() if name in weights}
    return Normal(program=found, derived=draft.derived, constants=kept)
