"""Rewrite rules in a file: what was found once, with the proof of it.

A rule says that a program may be replaced by a graph. The file is JSON: a version, the rules, and a
digest of both. A file that was edited, or is from another version, is refused whole: a proof speaks
of what was proven and of the code that proved it. Comes in, goes out: Rules. Next: rewrite.py.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any, get_args, get_type_hints

from distmega.arguments import is_number, require_type, shown
from distmega.errors import DistmegaError, RequestError
from distmega.json_file import parse_json_text
from distmega.program.text import parse_program, print_program
from distmega.program.types import Program
from distmega.sharding.search.cost import DEVICES
from distmega.superopt.graph.text import parse_graph
from distmega.superopt.proof.equivalence import Proof
from distmega.whole_file import naming_unwritable, replace_text, require_writable

VERSION = 5
"""Of the file's form, of uGraphs' text and of what a proof means."""


SHIPPED = Path(__file__).with_name("rules.json")
"""The rules that come with distmega."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteRule:
    """program may be replaced by graph (its printed form). as_ops: also by the graph's ops one by
    one, stored in the program's types. program_us, graph_us: predicted on `machine`. launches:
    warps, stages and resident blocks of each of the graph's kernels, as measured there; none where
    nobody did. library_us, measured_us: of the program without the rule, by torch.compile or op by
    op as is faster, and of the graph, measured side by side; 0 where nobody did.
    """

    name: str
    program: Program
    graph: str
    proof: Proof
    as_ops: bool
    machine: str
    program_us: float
    graph_us: float
    launches: tuple[tuple[int, int, int], ...] = ()
    library_us: float = 0.0
    measured_us: float = 0.0

    def __hash__(self) -> int:
        """Of what tells rules apart: they are looked up again and again."""
        return hash((self.name, self.graph))

    @property
    def saved_us(self) -> float:
        """What the graph saves: as measured, or as predicted where nobody measured it."""
        if self.measured_us:
            return self.library_us - self.measured_us
        return self.program_us - self.graph_us


@cache
def shipped_rules() -> tuple[RewriteRule, ...]:
    """The rules that come with distmega; none where the file was left out."""
    return tuple(read_rules(SHIPPED)) if SHIPPED.exists() else ()


def write_rules(path: Path, rules: Sequence[RewriteRule]) -> None:
    """Writes the file, whole or not at all. RequestError where it can't be written."""
    body = {"version": VERSION, "rules": [_encode(rule) for rule in rules]}
    with naming_unwritable(path, "path"):
        replace_text(path, json.dumps(body | {"digest": _digest(body)}, indent=1) + "\n")


def require_writable_rules(path: Path) -> None:
    """RequestError where write_rules could not write the file: before what takes long."""
    with naming_unwritable(path, "path"):
        require_writable(path)


def read_rules(path: str | PathLike[str]) -> list[RewriteRule]:
    """Rules of a file. RequestError if it can't be read, was edited or is from another version."""
    require_type("path", path, (str, PathLike), "the path of a rules file")
    path = Path(path)
    try:
        body: Any = parse_json_text(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise _refused(path, f"it can't be read ({why})") from error
    if not isinstance(body, dict) or set(body) != {"version", "rules", "digest"}:
        raise _refused(path, "it is no rules file")
    if body["version"] != VERSION:
        raise _refused(path, f"its version is {body['version']!r}, not {VERSION}")
    digest = body.pop("digest")
    if digest != _digest(body):
        raise _refused(path, "it was edited, its digest does not fit")
    try:
        rules = [_decode(rule) for rule in body["rules"]]
    except (DistmegaError, ArithmeticError, KeyError, TypeError, ValueError) as error:
        raise _refused(path, f"a rule can't be read ({error})") from error
    return rules


def _refused(path: Path, found: str) -> RequestError:
    return RequestError(
        f"rules file {str(path)!r:.200}: {found}",
        expected="a file as this version's `distmega superopt` writes it",
        remedy="run `distmega superopt` again",
    )


def _digest(body: object) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _encode(rule: RewriteRule) -> dict[str, object]:
    found = {f.name: getattr(rule, f.name) for f in fields(rule)}
    proof = asdict(rule.proof) | {"extents": [list(pair) for pair in rule.proof.extents]}
    return found | {
        "program": print_program(rule.program).splitlines(),
        "graph": rule.graph.splitlines(),
        "proof": proof
        | {name: list(proof[name]) for name in ("uninterpreted", "free", "constants")},
        "launches": [list(launch) for launch in rule.launches],
    }


def _decode(body: dict[str, Any]) -> RewriteRule:
    proof = dict(body["proof"])
    proof["extents"] = tuple(map(tuple, proof["extents"]))
    for name in ("uninterpreted", "free", "constants"):
        proof[name] = tuple(proof[name])
    graph = "\n".join(body["graph"]) + "\n"
    parse_graph(graph)
    made = {
        "program": parse_program("\n".join(body["program"])),
        "graph": graph,
        "proof": Proof(**proof),
        "launches": tuple(map(tuple, body["launches"])),
    }
    rule = RewriteRule(**{**body, **made})
    for part, kinds in zip((rule, rule.proof), _annotations(), strict=True):
        for name, kind in kinds.items():
            if not _is_of(getattr(part, name), kind):
                raise ValueError(f"{name} {shown(getattr(part, name))}")
    if rule.machine not in DEVICES:
        raise ValueError(f"machine {shown(rule.machine)}, not one of {', '.join(DEVICES)}")
    return rule


@cache
def _annotations() -> tuple[dict[str, Any], dict[str, Any]]:
    """Types of a rule's fields, and of a proof's."""
    return get_type_hints(RewriteRule), get_type_hints(Proof)


def _is_of(value: object, kind: Any) -> bool:
    """Whether a value is of an annotated type, and numbers are finite."""
    each = get_args(kind)
    if each:
        if not isinstance(value, tuple):
            return False
        kinds = each[:1] * len(value) if each[-1] is Ellipsis else each
        return len(kinds) == len(value) and all(map(_is_of, value, kinds))
    if kind is float:
        return is_number(value) and math.isfinite(value)
    return type(value) is kind
