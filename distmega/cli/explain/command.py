"""`distmega explain`: tells or draws what a decode step would be. Next: collect.py."""

import json
from dataclasses import asdict, dataclass
from typing import Literal

from rich.console import Console

from distmega.cli import explain
from distmega.cli.flags import EngineFlags, Model, OptionalFile
from distmega.cli.streams import say
from distmega.engine.decode_plan import model_mesh
from distmega.engine.requests import EngineOptions, ExplainRequest
from distmega.kernels.machines import MACHINES
from distmega.sources.locate import read_config
from distmega.whole_file import naming_unwritable, replace_text, require_writable


@dataclass(frozen=True, kw_only=True)
class Explain:
    """Say what a decode step costs, what bounds it, how it runs; reads no weights."""

    model: Model
    tp: int = 1
    """Tensor-parallel ranks of each stage."""
    pp: int = 1
    """Pipeline stages."""
    machine: Literal["auto", "cpu", "h100", "h200"] = "auto"
    """Whose cost model plans; auto is h200 for a built-in model of more than 1 GB of bf16 weights,
    else cpu.
    """
    memory_limit_gb: float = 0.0
    """Memory of a rank that weights and KV cache may take, 10^9 bytes; 0 sets no limit."""
    full: bool = False
    """Print every choice that was rejected, every tensor, and the segments op by op."""
    json: bool = False
    """Print all facts as JSON instead."""
    html: OptionalFile = None
    """Write a page to this file: a layer as a diagram, a timeline, bars. It opens offline."""
    engine: EngineFlags = EngineOptions()


def run_explain(command: Explain, console: Console) -> None:
    """Plans, and prints or writes what was planned."""
    limit = command.memory_limit_gb
    request = ExplainRequest(tp=command.tp, pp=command.pp, memory_limit_gb=limit)
    if command.html:
        with naming_unwritable(command.html, "html"):
            require_writable(command.html)
    config = read_config(command.model)
    machine = (
        explain.usual_machine(config) if command.machine == "auto" else MACHINES[command.machine]
    )
    report = explain.collect_decode(
        command.model,
        config,
        model_mesh(request.tp, request.pp),
        machine,
        command.engine,
        memory_limit_bytes=request.memory_limit_bytes,
        full=command.full,
    )
    if command.html:
        with naming_unwritable(command.html, "html"):
            replace_text(command.html, explain.write_page(report))
    if command.json:
        console.file.write(json.dumps(asdict(report), indent=1) + "\n")
        return
    for title, text in explain.write_report(report, full=command.full):
        console.rule(title, align="left")
        say(console, text)
    if command.html:
        say(console, f"[the page is in {command.html}]")
