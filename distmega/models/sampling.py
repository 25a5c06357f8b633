"""How the next token is chosen: what a user asks for, and what of it programs are built for.

Comes in: options of a request. Goes out: a Method, by which decoder.py builds its last ops, and the
values that these take as inputs. Neither torch nor a device is involved.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from distmega.arguments import is_list, is_number, shown
from distmega.errors import RequestError, argument, counted

MIN_CANDIDATES = 64
MAX_CANDIDATES = 1024
"""A top_k of at most this many is found among the largest of each part of the vocabulary."""

MAX_TOP_K = 2**31
MAX_SEED = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """What a program is built for; one program serves all values of Sampling with its method.

    greedy: the most likely token. plain: sampled at some temperature. limited: sampled among the
    most likely, the limits looked for among num_candidates of each part of the vocabulary, or among
    all tokens where that is 0.
    """

    kind: Literal["greedy", "plain", "limited"] = "greedy"
    num_candidates: int = 0

    @property
    def samples(self) -> bool:
        return self.kind != "greedy"

    @property
    def sorts_all(self) -> bool:
        """Whether limits take a look at the whole vocabulary in order."""
        return self.kind == "limited" and self.num_candidates == 0

    def describe(self) -> str:
        """In words."""
        if not self.samples:
            return "the most likely token"
        if self.kind == "plain":
            return "samples without limits"
        return f"samples with top_k of 1 to {self.num_candidates}" if self.num_candidates else "any"

    def serves(self, sampling: "Sampling") -> bool:
        """Whether a program built for this method can choose tokens as `sampling` says: the most
        likely one always.
        """
        wanted = sampling.method
        if not wanted.samples or wanted == self or self.sorts_all:
            return True
        return self.kind == wanted.kind == "limited" and (
            0 < wanted.num_candidates <= self.num_candidates
        )

    def settings_of(self, sampling: "Sampling") -> tuple[float, ...]:
        """A row of the program's input `sampling`, for a sampling that it serves: see ops.cutoff,
        or ops.sample's limits. A temperature of 0 leaves the most likely token alone.
        """
        if self.kind == "plain":
            return sampling.temperature, -math.inf
        return sampling.temperature, float(sampling.top_k), sampling.top_p


GREEDY = Method()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen, in the terms of Hugging Face transformers and in that order. Tokens as
    likely as the last that a limit keeps are kept too. Of several sequences decoded together,
    number i samples with seed + i. RequestError for a value out of range, and for limits or a seed
    at temperature 0, where nothing is sampled.

    Attributes:
        temperature: 0 takes the most likely token; above, tokens are sampled by the softmax of
            logits over the temperature.
        top_k: Sample among this many most likely tokens; 0 is all.
        top_p: Sample among the most likely tokens that make up this probability.
        seed: Equal seeds sample equal tokens, on any number of ranks: samples depend on it, on
            logits and on positions alone.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_types()
        in_fp32 = not self.temperature or 1e-30 <= self.temperature <= 1e30
        for option, value, fits, expected in (
            ("temperature", self.temperature, in_fp32, "0, or from 1e-30 to 1e30"),
            ("top_k", self.top_k, self.top_k >= 0, "at least 0"),
            ("top_k", self.top_k, self.top_k < MAX_TOP_K, "below 2^31"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "more than 0, at most 1"),
            ("seed", self.seed, 0 <= self.seed < MAX_SEED, "at least 0, below 2^63"),
        ):
            if not fits:
                raise RequestError(
                    f"{argument(option)} {shown(value)}",
                    expected=expected,
                    remedy="choose a value in that range",
                )
        unused = {"top_k": self.top_k, "top_p": self.top_p % 1, "seed": self.seed}
        for option in (name for name, value in unused.items() if value and not self.temperature):
            raise RequestError(
                f"{argument(option)} with temperature 0, where nothing is sampled",
                expected=f"{argument('temperature')} above 0",
                remedy=f"add {argument('temperature')} 1, or leave out {argument(option)}",
            )

    def _check_types(self) -> None:
        for option, value in (("temperature", self.temperature), ("top_p", self.top_p)):
            if not is_number(value):
                raise _bad_type(option, value, "a number")
        for option, value in (("top_k", self.top_k), ("seed", self.seed)):
            if type(value) is not int:
                raise _bad_type(option, value, "a whole number")

    @property
    def method(self) -> Method:
        """What a program must be built for."""
        if not self.temperature:
            return GREEDY
        if self.top_k == 0 and self.top_p == 1:
            return Method(kind="plain")
        num = 1 << max(MIN_CANDIDATES, self.top_k).bit_length() - 1
        num = num if num >= self.top_k else 2 * num
        return Method(kind="limited", num_candidates=num if 0 < self.top_k <= MAX_CANDIDATES else 0)

    def seed_of(self, sequence: int) -> int:
        """The seed of one of the sequences that are decoded together."""
        return (self.seed + sequence) % MAX_SEED

    @property
    def settings(self) -> tuple[float, ...]:
        """A row of the input `sampling` of a program for its own method."""
        return self.method.settings_of(self)

    def at(self, sequence: int) -> "Sampling":
        """The same, with the seed of one of the sequences that are decoded together."""
        return replace(self, seed=self.seed_of(sequence)) if self.method.samples else self


def _bad_type(option: str, value: object, expected: str) -> RequestError:
    return RequestError(
        f"{argument(option)} {shown(value)}", expected=expected, remedy="give one of that type"
    )


MOST_LIKELY = Sampling()
"""Nothing is sampled."""

Samplings = Sampling | Sequence[Sampling]
"""One for all sequences, which sample with seeds of their own, or one for each sequence."""


def sampling_of_each(samplings: Samplings, num: int) -> list[Sampling]:
    """The sampling of each of `num` sequences; RequestError for another number of them."""
    _require_samplings(samplings)
    if isinstance(samplings, Sampling):
        return [samplings.at(sequence) for sequence in range(num)]
    if len(samplings) != num:
        raise RequestError(
            f"{counted(len(samplings), 'sampling')} of {counted(num, 'sequence')}",
            expected="one Sampling for all, or one for each",
            remedy="give as many as prompts",
        )
    return list(samplings)


def _require_samplings(samplings: object) -> None:
    listed = is_list(samplings) and all(isinstance(each, Sampling) for each in samplings)
    if not listed and not isinstance(samplings, Sampling):
        raise RequestError(
            f"sampling {shown(samplings)}", expected="a Sampling, or several", remedy="give one"
        )


def joint_method(samplings: Samplings) -> Method:
    """The method of one program that serves all of them, the cheapest there is. RequestError for
    what is no Sampling.
    """
    _require_samplings(samplings)
    found = [samplings] if isinstance(samplings, Sampling) else samplings
    wanted = [one.method for one in found if one.method.samples]
    if not wanted:
        return GREEDY
    most = max(wanted, key=lambda method: method.num_candidates)
    serves_all = all(most.serves(one) for one in found)
    return most if serves_all else Method(kind="limited")
