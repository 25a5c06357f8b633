"""Chat templates rendered within limits: a template and messages in, the text of a prompt out.

A template comes with a model and is a program. It runs in a process of its own, sandboxed, whose
processor time, memory and output are limited (chat_template_child.py); one such process serves all
templates of this one and ends with it.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from distmega.errors import ChatTemplateError, RequestError

CHILD = Path(__file__).with_name("chat_template_child.py")
MAX_TEMPLATE_CHARS = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderLimits:
    """What rendering one conversation may take: seconds of processor time (and more of the clock,
    where others work too), bytes of address space, characters of text.
    """

    cpu_s: int = 5
    clock_s: float = 300.0
    memory_bytes: int = 2**29
    num_chars: int = 2**23


LIMITS = RenderLimits()


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, object]],
    special_tokens: Mapping[str, str],
    limits: RenderLimits = LIMITS,
) -> str:
    """The conversation as the template writes it, up to where the model answers.

    ChatTemplateError for a template that fails, refuses the messages or passes a limit;
    RequestError for messages that are not made of texts, numbers, lists and mappings.
    """
    if len(template) > MAX_TEMPLATE_CHARS:
        raise _failed(f"it has {len(template)} characters, more than {MAX_TEMPLATE_CHARS}")
    request = {"template": template, "special_tokens": dict(special_tokens), **asdict(limits)}
    try:
        line = json.dumps({**request, "messages": [dict(message) for message in messages]})
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(
            f"messages that can't be passed on ({error})",
            expected='mappings such as {"role": "user", "content": "text"}',
            remedy="pass texts",
        ) from error
    answer = _worker.ask(line, limits)
    if "text" not in answer:
        raise _failed(answer["error"])
    return answer["text"]


def _failed(reason: str) -> ChatTemplateError:
    return ChatTemplateError(
        f"the chat template of the model fails: {reason}",
        expected="messages that it accepts",
        remedy="give a plain prompt, or other messages",
    )


class _Worker:
    """The process that renders, started when it is first needed and again after it has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def ask(self, line: str, limits: RenderLimits) -> dict[str, str]:
        """The answer to a request: {"text": ...} or {"error": ...}."""
        with self._lock:
            process = self._running()
            assert process.stdin
            assert process.stdout
            alarm = threading.Timer(limits.clock_s, process.kill)
            alarm.daemon = True
            alarm.start()
            try:
                process.stdin.write(line + "\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            except OSError:  # it has ended
                answer = ""
            finally:
                alarm.cancel()
            if answer.endswith("\n"):
                found: dict[str, str] = json.loads(answer)
                if "ends" in found:
                    self.end()
                return found
            process.wait()
            return {"error": _end_of(self.end(), limits)}

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self.end()
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(CHILD)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=environment,
            )
        return self._process

    def end(self) -> int:
        """Ends the process, if there is one; its exit code."""
        process, self._process = self._process, None
        if process is None:
            return 0
        process.kill()
        with process:
            return process.wait()


def _end_of(code: int, limits: RenderLimits) -> str:
    """Why the process ended without an answer."""
    if code == -signal.SIGXCPU:
        return f"it takes more than {limits.cpu_s} s"
    if code == -signal.SIGKILL:
        return f"it takes more than {limits.clock_s:g} s, or was killed"
    return f"the process that renders it ended with code {code}"


_worker = _Worker()
atexit.register(_worker.end)
