"""The process that renders chat templates, for chat_template.py: a request a line on stdin, an
answer a line on stdout, both JSON.

A script of its own, which imports nothing of distmega. It limits itself before it looks at a
template: address space and processor time, no files to write, no core file. What passes the limits
ends it, and its parent says so. Templates find what those of transformers find.
"""

import json
import resource
import sys
import time
from contextlib import suppress
from datetime import datetime

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
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
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _strftime_now}
    template = environment.from_string(str(request["template"]))
    values = {
        **request["special_tokens"],  # type: ignore[dict-item]
        "messages": request["messages"],
        "tools": None,
        "documents": None,
        "add_generation_prompt": True,
    }
    most, pieces, num_chars = int(str(request["num_chars"])), [], 0
    for piece in template.generate(**values):
        num_chars += len(piece)
        if num_chars > most:
            raise TemplateError(f"it writes more than {most} characters")
        pieces.append(piece)
    return "".join(pieces)


class _Generation(Extension):
    """What is between {% generation %} and {% endgeneration %}: marks for training, text here."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), True), lineno=line)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; jinja's own filter would write < and & for a page."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _refuse(message: str) -> str:
    raise TemplateError(message)


if __name__ == "__main__":
    main()
