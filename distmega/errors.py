"""Every error a user can meet, one class per kind of mistake.

A message names the value, what was expected and the remedy, in that order. Errors in what was asked
derive from ValueError, faults of a running job from RuntimeError; the command line prints either in
one line. Arguments that the command has as flags are marked in it, so that the command can name the
flag and the library the argument.
"""

import re
from collections.abc import Mapping

_MARK = "\x1f"
_MARKED = re.compile(f"{_MARK}(\\w+){_MARK}")
NO_NAMES: Mapping[str, str] = {}


def argument(name: str) -> str:
    """The name of an argument as messages hold it: what is printed is the name, or the flag."""
    return f"{_MARK}{name}{_MARK}"


def counted(count: int, noun: str) -> str:
    """A count and what is counted, regular in the plural: 1 rank, 2 processes."""
    ending = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{count} {noun}{ending}"


class DistmegaError(Exception):
    """Base of all errors raised on purpose; `distmega` exits with code 2 on a ValueError, 1 on a
    RuntimeError.

    Attributes:
        found: The value or the event that is wrong.
        expected: What would have been right.
        remedy: What to do.
    """

    def __init__(self, found: str, *, expected: str, remedy: str) -> None:
        self.found, self.expected, self.remedy = found, expected, remedy
        super().__init__(found, expected, remedy)

    def __str__(self) -> str:
        return _MARKED.sub(r"\1", self._text())

    def with_flags(self, names: Mapping[str, str] = NO_NAMES) -> str:
        """The message with flags in place of arguments. names: of arguments whose flag is not
        their own name.
        """

        def flag(match: re.Match[str]) -> str:
            return "--" + names.get(match[1], match[1]).replace("_", "-")

        return _MARKED.sub(flag, self._text())

    def _text(self) -> str:
        return f"{self.found}; expected {self.expected}; {self.remedy}"

    def __reduce__(self) -> tuple[object, ...]:
        kept = {name: value for name, value in vars(self).items() if name != "__notes__"}
        return _rebuild, (type(self), self.args), kept


def _rebuild(kind: type[DistmegaError], args: tuple[object, ...]) -> DistmegaError:
    """An error without a call of its class, which may take other arguments."""
    return kind.__new__(kind, *args)


class ProgramError(DistmegaError, ValueError):
    """A tensor program is malformed: shapes, names, specs or expressions that do not fit."""


class ParseError(DistmegaError, ValueError):
    """A printed program or host program cannot be read back."""


class MeshError(DistmegaError, ValueError):
    """A device mesh is malformed, or does not fit the number of ranks."""


class PlanError(DistmegaError, ValueError):
    """No sharding plan satisfies the request (degree, memory limit, annotations)."""


class VerifyError(DistmegaError, ValueError):
    """An IR breaks one of its rules; raised by the verifiers after a pass."""


class UnsupportedError(DistmegaError, ValueError):
    """What was asked for is valid, and nothing here does it."""


class CheckError(DistmegaError, ValueError):
    """The task graph or host program has a race, a deadlock or a wait nobody satisfies."""


class ModelError(DistmegaError, ValueError):
    """A model, its configuration or its weights are missing, damaged or unknown."""


class UnknownModelError(ModelError):
    """A model that our own decoders don't cover; transformers may have it."""


class CaptureError(DistmegaError, ValueError):
    """A torch module, its inputs or its weights can't become a program."""


class ArgumentsError(CaptureError, TypeError):
    """A captured module is called with arguments that its forward does not take."""


class RequestError(DistmegaError, ValueError):
    """A prompt or an option is outside what the model or the machine allows."""


class ChatTemplateError(ModelError, RequestError):
    """The chat template of a model fails on messages, refuses them or takes too much: the model's
    fault or the messages', which nobody can tell apart.
    """


class LaunchError(DistmegaError, RuntimeError):
    """Ranks could not be started, or do not agree on what to run."""


class RankFailure(DistmegaError, RuntimeError):
    """A rank died or failed while a request was running."""

    def at(self, where: str) -> "RankFailure":
        """The same failure, which also says where the rank that noticed it stood."""
        found = f"{self.found}, at {where}"
        failure = type(self)(found, expected=self.expected, remedy=self.remedy)
        failure.__cause__ = self
        return failure


class LostPeerError(RankFailure):
    """An exchange with other ranks failed, so one of them most likely ended or stands still; where
    that one is known, a RankFailure names it instead.
    """


class HangError(DistmegaError, RuntimeError):
    """A bounded wait expired; names the waiting task, the event and who owes it."""
