"""What event tensors are asked with is what it should be, or is named.

In: an argument and the types that it may have. Out: nothing, or ProgramError. Used by the functions
of the door.
"""

from distmega.errors import ProgramError

MOST = 1024
"""Of SMs, ranks and the like, as an engine takes them too (EngineOptions)."""


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


def require_count(found: object, name: str, most: int = MOST, *, least: int = 1) -> None:
    """ProgramError unless `found` is a whole number from `least` to `most`."""
    if type(found) is not int or not least <= found <= most:
        raise ProgramError(
            f"{name} {found!r:.60}",
            expected=f"a whole number of at least {least}, at most {most}",
            remedy="correct the argument",
        )
