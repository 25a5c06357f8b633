"""The one place where DISTMEGA_* variables are read: an environment in, typed settings out, bad
values raise.

DISTMEGA_LOG: the lowest level that is logged: debug, info, warning (default) or error.
DISTMEGA_TIMEOUT_S: seconds without news from the ranks after which a job is given up (default 300).
DISTMEGA_THREADS: torch threads of each rank (default: the node's cores divided by its ranks).
DISTMEGA_SHARE_GPUS: 1 where ranks may share GPUs, slowly, for tests; 0 (default): one each.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

from distmega.errors import RequestError

PREFIX = "DISTMEGA_"
NAMES = ("DISTMEGA_LOG", "DISTMEGA_TIMEOUT_S", "DISTMEGA_THREADS", "DISTMEGA_SHARE_GPUS")
MAX_SECONDS = 1e6
"""Of a timeout: more than a week is none, and more than some clocks take."""
MAX_THREADS = 4096
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The variables' values. `num_threads` is None when the launcher is to choose."""

    log: str
    timeout_s: float
    num_threads: int | None
    share_gpus: bool = False


def read_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """Read every variable; raises RequestError on a bad value or an unknown DISTMEGA_* name."""
    for name in environment:
        if name.startswith(PREFIX) and name not in NAMES:
            raise _bad_variable(name, environment[name], f"one of {', '.join(NAMES)}")
    return Settings(
        log=_read_choice(environment, "DISTMEGA_LOG", LOG_LEVELS, "warning"),
        timeout_s=_read_seconds(environment, "DISTMEGA_TIMEOUT_S", 300.0),
        num_threads=_read_count(environment, "DISTMEGA_THREADS"),
        share_gpus=_read_choice(environment, "DISTMEGA_SHARE_GPUS", ("0", "1"), "0") == "1",
    )


def _read_choice(
    environment: Mapping[str, str], name: str, choices: tuple[str, ...], default: str
) -> str:
    text = environment.get(name, default)
    if text not in choices:
        raise _bad_variable(name, text, f"one of {', '.join(choices)}")
    return text


def _read_seconds(environment: Mapping[str, str], name: str, default: float) -> float:
    text = environment.get(name, str(default))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_SECONDS:
        raise _bad_variable(name, text, f"a positive number of seconds, at most {MAX_SECONDS:g}")
    return seconds


def _read_count(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name)
    if text is None:
        return None
    if not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= MAX_THREADS:
        raise _bad_variable(name, text, f"a whole number of at least 1, at most {MAX_THREADS}")
    return int(text)


def _bad_variable(name: str, text: str, expected: str) -> RequestError:
    return RequestError(
        f"environment variable {name}={text[:80]!r}",
        expected=expected,
        remedy=f"correct or unset {name}",
    )
