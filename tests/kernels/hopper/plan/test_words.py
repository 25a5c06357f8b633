"""Words that several values share: none spills into its neighbour's bits. Words of queues."""

import ast
from pathlib import Path

import pytest

from distmega.kernels.hopper.batch_plan import words as batch_words
from distmega.kernels.hopper.plan import words
from distmega.kernels.hopper.plan.encoded import pack_queues
from distmega.kernels.hopper.plan.words import WORDS, join_bits, signed_bits


def test_values_lie_one_behind_the_other():
    word = join_bits((5, 0), (signed_bits(-2, 16), 8), (3, 24))
    assert (word & 0xFF, word >> 8 & 0xFFFF, word >> 24) == (5, 0xFFFE, 3)


@pytest.mark.parametrize(
    "parts", [((256, 0), (1, 8)), ((-1, 0), (1, 8)), ((1, 0), (1 << 23, 8)), ((1 << 31, 0),)]
)
def test_a_value_that_its_bits_do_not_hold_is_a_fault(parts):
    with pytest.raises(AssertionError, match="bits of"):
        join_bits(*parts)


@pytest.mark.parametrize("value", [1 << 15, -(1 << 15) - 1])
def test_a_number_beyond_its_sign_is_a_fault(value):
    with pytest.raises(AssertionError, match="in 16 bits"):
        signed_bits(value, 16)


def test_shorter_queues_end_in_zeros():
    packed = pack_queues([(3,), (), (1, 2)], lambda one: [one] * WORDS)
    assert packed.shape == (3, 2, WORDS)
    assert packed[:, :, 0].tolist() == [[3, 0], [0, 0], [1, 2]]
    assert (packed == packed[:, :, :1]).all()


def test_no_name_stands_for_two_things():
    """A constant that both kernels have is defined once; what each has of its own says whose it
    is.
    """
    rows, batch = (
        {
            target.id
            for node in ast.parse(Path(module.__file__).read_text()).body
            if isinstance(node, ast.Assign)
            for target in ast.walk(node)
            if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store)
        }
        for module in (words, batch_words)
    )
    assert "NOTHING" in rows
    assert rows & batch <= {"FIELD_WORDS"}
