"""The process that renders chat templates, for chat_template.py: a request a line on stdin, an
answer a line on stdout, both JSON.

A script of its own, which imports nothing of distmega. It limits itself before it looks at a
template: address space and processor time, no files to write, no core file. What passes the limits
ends it, and its parent says so.
"""

import json
import resource
import sys
import time
from contextlib import suppress

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment


def main() -> None:
    """Answers requests until the parent closes the pipe."""
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, 0)
    for line in sys.stdin:
        request = json.loads(line)
        _limit(resource.RLIMIT_AS, request["memory_bytes"])
        _limit(resource.RLIMIT_CPU, int(time.process_time()) + 1 + request["cpu_s"])
        try:
            answer = {"text": _render(request)}
        except (MemoryError, RecursionError) as error:
            answer = {"error": f"it takes too much ({type(error).__name__})", "ends": "now"}
        except Exception as error:  # whatever a template does
            answer = {"error": str(error)[:500] or type(error).__name__}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
        if "ends" in answer:
            return


def _limit(kind: int, most: int) -> None:
    """Lowers a soft limit where the system has it."""
    with suppress(ValueError, OSError):
        resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))


def _render(request: dict[str, object]) -> str:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _refuse
    template = environment.from_string(str(request["template"]))
    values = {
        **request["special_tokens"],  # type: ignore[dict-item]
        "messages": request["messages"],
        "add_generation_prompt": True,
    }
    most, pieces, num_chars = int(str(request["num_chars"])), [], 0
    for piece in template.generate(**values):
        num_chars += len(piece)
        if num_chars > most:
            raise TemplateError(f"it writes more than {most} characters")
        pieces.append(piece)
    return "".join(pieces)


def _refuse(message: str) -> str:
    raise TemplateError(message)


if __name__ == "__main__":
    main()
