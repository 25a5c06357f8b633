"""The calls of an engine: one at a time, in the process that made it, generators that notice other
calls, and no call behind one in which ranks parted.

Comes in: the number of threads and processes that a user happens to have. Goes out: the work of one
call after the other, or RequestError, since caches and positions belong to one caller. Used by
engine.py; packing.py and prefill.py take its Tokens.
"""

import os
import threading
from array import array
from collections.abc import Generator, Mapping, Set
from contextlib import AbstractContextManager, closing, suppress
from operator import index
from types import TracebackType
from typing import Self, TypeAlias, TypeVar

import numpy as np
import torch

from distmega.arguments import shown
from distmega.engine.ranks.own_process import require_process
from distmega.engine.texts import require_known
from distmega.errors import HangError, RequestError
from distmega.hostir.library.torch_types import ordinary_tensors

T = TypeVar("T")
Tokens: TypeAlias = "array[int]"
"""Ids of tokens, in order: of 64 bits, with a sign ("q")."""


class Calls:
    """The calls of one engine so far; see `alone` and `uninterrupted`."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._number = 0
        self._modes: list[AbstractContextManager[None] | None] = []
        """Of the calls that are under way, one within the other; None costs a token nothing."""
        self.are_over = False
        """Whether the engine is closed."""

    def alone(self) -> Self:
        """Around a call, or a part of one that makes a whole. RequestError while another thread is
        in one, in a process that was forked from the engine's, and once the engine is closed.
        """
        return self

    def require_open(self) -> None:
        """RequestError once the engine is closed."""
        if self.are_over:
            raise RequestError(
                "a call of an engine after its close()",
                expected="calls before",
                remedy="open another engine, on all ranks",
            )

    def __enter__(self) -> None:
        require_process(self._process, "an engine")
        self.require_open()
        if not self._lock.acquire(blocking=False):
            raise RequestError(
                "a call while another thread's call of this engine runs",
                expected="one call at a time",
                remedy="take turns with a lock, or put prompts into one batch (generate_all)",
            )
        self._number += 1
        mode = ordinary_tensors() if torch.is_inference_mode_enabled() else None
        if mode is not None:
            mode.__enter__()
        self._modes.append(mode)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        mode = self._modes.pop()
        try:
            if mode is not None:
                mode.__exit__(kind, error, trace)
        finally:
            self._lock.release()

    def uninterrupted(self, steps: Generator[T]) -> Generator[T]:
        """What `steps` yields, each item by a call alone. RequestError where another call came
        between two of them: it may have started other sequences, or gone on with these.
        """
        with closing(steps):
            while True:
                with self.alone():
                    item = next(steps, self)
                if isinstance(item, Calls):
                    return
                number = self._number
                yield item
                if self._number != number:
                    raise RequestError(
                        "a generator resumed after another call of its engine",
                        expected="no other call until it has ended or is left",
                        remedy="take its tokens first, generate for several prompts at once "
                        "(generate_all), or open an engine for each",
                    )


class RanksInStep:
    """Around what ranks do together. RequestError once a call of several ranks has ended in a
    HangError: they have not run the same launches then.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._hang = ""

    def __enter__(self) -> None:
        if self._hang:
            raise RequestError(
                f"a call after a hang ({self._hang})",
                expected="ranks that have run the same launches",
                remedy="open the engine anew on all ranks",
            )

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, HangError) and self._num_ranks > 1:
            self._hang = error.found


def require_tokens(ids: object, vocab: int, which: str = "") -> list[int]:
    """Token ids as whole numbers, from 0 to vocab - 1; RequestError for anything else, True and
    False among it, and for what holds them in no order, or is a text. which: says in a message
    where a wrong one is given.
    """
    found = None
    if not isinstance(ids, bytes | Mapping | Set):
        with suppress(TypeError, RuntimeError):  # not whole, or a tensor of several dims
            given = [*ids]  # type: ignore[misc]
            found = None if any(map(_is_switch, given)) else [*map(index, given)]
    if found is None:
        raise RequestError(
            f"tokens {shown(ids)}",
            expected="whole numbers in a sequence",
            remedy="give what the model's tokenizer gives",
        )
    require_known(found, vocab, which)
    return found


def _is_switch(token: object) -> bool:
    """Whether something is True or False, or a tensor of these."""
    return isinstance(token, bool) or getattr(token, "dtype", None) is torch.bool


FEW_TOKENS = 1024
"""Up to which Python finds the least and the largest before NumPy's code is in a cache."""


def prompt_tokens(ids: object, vocab: int, which: str = "") -> Tokens:
    """As require_tokens, of many: an array reads a list in a quarter of the time."""
    found = None
    if isinstance(ids, list | tuple) and {*map(type, ids)} == {int}:
        if len(ids) <= FEW_TOKENS and 0 <= min(ids) <= max(ids) < vocab:
            return array("q", ids)
        with suppress(OverflowError):
            found = array("q", ids)
    elif type(ids) is np.ndarray and ids.ndim == 1 and ids.dtype.kind in "iu":
        found = array("q", ids.astype(np.int64).tobytes())
    # a negative one is a large one without its sign
    if not found or np.frombuffer(found, np.uint64).max() >= vocab:
        found = array("q", require_tokens(ids, vocab, which))
    return found
