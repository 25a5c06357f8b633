"""Arguments as users give them: refused by type before anything is asked of them, and shown in
messages whatever they are.

In: an argument's name and what was given for it. Out: nothing, or an error of the caller's kind, by
default RequestError. Used wherever the library takes values from its users.
"""

import reprlib
from collections.abc import Sequence
from typing import Any, TypeGuard

from distmega.errors import DistmegaError, RequestError, argument

MAX_COUNT = 2**31 - 1
MAX_NUMBER = 2**63 - 1
SHOWN_BITS = 64
SHOWN_CHARS = 100
SHOWN_ITEMS = 12

_short = reprlib.Repr()
_short.maxstring = _short.maxother = SHOWN_CHARS
_short.maxlist = _short.maxtuple = _short.maxset = _short.maxdict = SHOWN_ITEMS


def shown(value: object) -> str:
    """A value as a message shows it: as it prints, the middle of what is long left out."""
    if isinstance(value, int) and value.bit_length() > SHOWN_BITS:
        return f"of {value.bit_length()} bits"
    try:
        text = _short.repr(value)
    except Exception:  # whatever its class does
        text = f"a {type(value).__name__}"
    rest = 2 * SHOWN_CHARS
    return text if len(text) <= rest else f"{text[:SHOWN_CHARS]}...{text[-SHOWN_CHARS:]}"


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether something is an int or a float, which True is not meant to be."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Whether something holds values in order, as a list, which text and bytes are not meant to."""
    if type(value) is list:  # nearly always, and known without asking what is a Sequence
        return True
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def require_type(
    name: str,
    value: object,
    kinds: type | tuple[type, ...],
    expected: str,
    remedy: str = "give one of that type",
    *,
    error: type[DistmegaError] = RequestError,
) -> None:
    """Refuses what is not of these types; expected: what it is, in words."""
    if not isinstance(value, kinds):
        raise error(f"{argument(name)} {shown(value)}", expected=expected, remedy=remedy)


def require_switch(name: str, value: object, *, error: type[DistmegaError] = RequestError) -> None:
    """Refuses what is neither True nor False."""
    require_type(name, value, bool, "True or False", "give one of these", error=error)


def require_whole(
    name: str,
    value: object,
    least: int,
    most: int = MAX_COUNT,
    *,
    error: type[DistmegaError] = RequestError,
) -> None:
    """Refuses what is no int, and one out of range."""
    found = f"{argument(name)} {shown(value)}"
    if type(value) is not int:
        raise error(found, expected="a whole number", remedy=f"give {least} or more")
    if value < least:
        remedy = f"raise it to {least} or more"
        raise error(found, expected=f"at least {least}", remedy=remedy)
    if value > most:
        raise error(found, expected=f"at most {most}", remedy="lower it")


def require_number(
    name: str,
    value: object,
    most: float,
    *,
    zero: bool = False,
    error: type[DistmegaError] = RequestError,
) -> None:
    """Refuses what is no int or float, and one out of range. zero: may be 0, not above it alone."""
    if not is_number(value) or not (0 < value <= most or (zero and value == 0)):
        least = "at least 0" if zero else "more than 0"
        raise error(
            f"{argument(name)} {shown(value)}",
            expected=f"{least}, and finite: at most {most:g}",
            remedy="choose a number in that range",
        )


def require_one_of(
    name: str,
    value: object,
    known: Sequence[str],
    *,
    error: type[DistmegaError] = RequestError,
) -> None:
    """Refuses what is none of these texts."""
    if not isinstance(value, str) or value not in known:
        raise error(
            f"{argument(name)} {shown(value)}",
            expected=f"one of {', '.join(known)}",
            remedy="choose one of these",
        )


def require_callable(name: str, value: object) -> None:
    """Refuses what can't be called."""
    if not callable(value):
        found = f"{argument(name)} {shown(value)}"
        raise RequestError(found, expected="a function", remedy="give one, or leave it out")


def require_texts(name: str, values: object) -> None:
    """Refuses what is no tuple or list of texts, and halves of surrogate pairs in them, which no
    encoding has.
    """
    if not isinstance(values, tuple | list) or not all(isinstance(text, str) for text in values):
        found = f"{argument(name)} {shown(values)}"
        raise RequestError(found, expected="texts in a tuple", remedy='give ("text",)')
    for text in values:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            found = f"{argument(name)} {shown(text)} can't be encoded"
            raise RequestError(found, expected="valid Unicode", remedy="give UTF-8 text") from error
