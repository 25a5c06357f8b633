"""What event tensors are asked with is what it should be, or is named.

In: an argument and the types that it may have. Out: nothing, or ProgramError. Used by the functions
of the door.
"""

from distmega.errors import ProgramError


def require(found: object, types: type | tuple[type, ...], name: str, expected: str) -> None:
    """ProgramError unless `found`, the argument `name`, is of these types. expected: what it is, in
    words.
    """
    if not isinstance(found, types) or isinstance(found, bool):
        raise ProgramError(
            f"{name} {found!r:.60}, of type {type(found).__name__}",
            expected=expected,
            remedy="correct the argument",
        )


def require_count(found: object, name: str) -> None:
    """ProgramError unless `found` is a whole number of at least 1."""
    if type(found) is not int or found < 1:
        raise ProgramError(
            f"{name} {found!r:.60}",
            expected="a whole number of at least 1",
            remedy="correct the argument",
        )
