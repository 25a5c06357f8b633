"""The `distmega` command and what it prints; no other module prints.

Next on the walk: launch/launchers.py for what runs, explain/ for what only plans.
"""

import errno
import json
import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.text import Text

from distmega import __version__
from distmega.arguments import require_whole
from distmega.cli import explain
from distmega.cli.calibration import calibrate_machine
from distmega.cli.doctor import examine, gather_facts
from distmega.cli.loading_bar import show_loading
from distmega.cli.streams import (
    STDIN,
    drop_output,
    open_console,
    open_streams,
    read_argument,
    read_text,
    say,
    split_lines,
    wrap_text,
)
from distmega.cli.superopt import SuperoptRequest, run_superopt
from distmega.engine.decode_plan import model_mesh
from distmega.engine.requests import (
    MAX_DEGREE,
    EngineOptions,
    ExplainRequest,
    GenerateRequest,
    GenerateResult,
    Opened,
    ScoreRequest,
    ScoreResult,
    Token,
    TraceRequest,
    TraceResult,
)
from distmega.env import read_settings
from distmega.errors import DistmegaError, LaunchError, RequestError, counted
from distmega.generation import check_model, reserve_ranks
from distmega.kernels.machines import MACHINES
from distmega.launch.contract import LauncherOptions
from distmega.launch.launchers import (
    choose_device,
    choose_launcher,
    choose_num_ranks,
    is_under_torchrun,
    launch,
    should_report,
)
from distmega.models.sampling import Sampling
from distmega.sources.locate import read_config
from distmega.superopt.search.schedule import SearchLimits
from distmega.whole_file import naming_unwritable, replace_text, require_writable

DESCRIPTION = (
    "LLM inference on 1 to 8 GPUs.\n\n"
    "Exit code 2: a wrong request, 1: a fault while running.\n\n"
    "distmega --version prints the version."
)
FLAGS = {"num_steps": "steps", "position": "context", "path": "out"}
"""Arguments of the library by the flags that set them, where these have names of their own."""

EngineFlags = Annotated[EngineOptions, tyro.conf.arg(name="", prefix_name=False)]
SamplingFlags = Annotated[Sampling, tyro.conf.arg(name="", prefix_name=False)]
MODEL_HELP = (
    "Preset (a wrong name lists them), GGUF file, Hugging Face folder, config.json (random "
    "weights), or org/name of the Hugging Face Hub."
)
Model = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL", help=MODEL_HELP)]
Prompts = Annotated[
    tuple[str, ...],
    tyro.conf.Positional,
    tyro.conf.arg(metavar="[PROMPT ...]", help_behavior_hint=""),
]
Texts = Annotated[tuple[str, ...], tyro.conf.arg(metavar="[TEXT ...]", help_behavior_hint="")]
Out = Annotated[Path, tyro.conf.arg(metavar="FILE")]
OptionalFile = Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")]


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Who runs."""

    tp: int = 0
    """Tensor-parallel ranks of each stage; 0 is all that torchrun started, else 1."""
    pp: int = 1
    """Pipeline stages, each with a part of the layers and tp ranks; 1 is no pipeline."""
    launcher: Literal["auto", "local", "torchrun", "ray"] = "auto"
    """Who starts them; auto is torchrun in a process that torchrun started, else local."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where ranks run; auto is cuda on a machine with an NVIDIA GPU, else cpu."""
    max_restarts: int = 0
    """Start all ranks again, up to so many times, after one has failed (local and ray)."""


RankFlags = Annotated[Ranks, tyro.conf.arg(name="", prefix_name=False)]


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Continue prompts, token by token; several are decoded together."""

    model: Model
    prompts: Prompts = ()
    """Texts to continue."""
    prompts_file: OptionalFile = None
    """A UTF-8 file with a prompt on each line, besides those given; - is standard input."""
    max_new_tokens: int = 64
    """Stop after this many tokens, or at the model's end token."""
    chat: bool = False
    """Put the prompt into the model's chat template."""
    echo: bool = False
    """Print the prompt before its answer."""
    stop: Texts = ()
    """Texts before which an answer ends."""
    ignore_eos: bool = False
    """Go on after the model's end token."""
    sampling: SamplingFlags = Sampling()
    ranks: RankFlags = Ranks()
    engine: EngineFlags = EngineOptions()


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


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """Perplexity of a text file under a model."""

    model: Model
    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """UTF-8 text; - is standard input. One longer than the context is read in windows of its size,
    each token with at least half of one before it.
    """
    ranks: RankFlags = Ranks()
    engine: EngineFlags = EngineOptions()


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Say what this machine has, what does not fit, and what to do about it."""

    calibrate: bool = False
    """Measure on this machine's GPUs what the choice of overlap needs, and keep it."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Write a timeline of decode steps on Hopper GPUs, and say where the time went.

    ui.perfetto.dev opens the file.
    """

    model: Model
    out: Out = Path("trace.json")
    """File to write."""
    steps: int = 2
    """Decode steps."""
    context: int = 512
    """Cached positions before the first step; what they hold does not matter."""
    ranks: RankFlags = Ranks()
    engine: EngineFlags = EngineOptions()


@dataclass(frozen=True, kw_only=True)
class Superopt:
    """Search equivalents of a tensor program, prove them, keep them as rules.

    Ctrl-C ends the search, and so does its budget; what it has found is kept.
    """

    program: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PROGRAM")]
    """A file with a printed program, - for standard input, or a case such as
    "lora k=4096 n=4096 rank=16 rows=1".
    """
    out: Out = Path("rules.json")
    """Rules file to write."""
    machine: Literal["h100", "h200"] = "h200"
    """Whose cost model predicts."""
    slack: int = 1
    """Ops beyond the least that a graph may have."""
    kernels: int = 3
    """Kernels that a graph may have."""
    kept: int = 12
    """Graphs, of different structure, that are proven at most."""
    budget: int = 600
    """Seconds of search, after which the best graph found so far is proven; 0 sets no limit."""
    seed: int = 0
    """Of the proofs' random tests; the search has no chance in it."""
    full: bool = False
    """Print all graphs, not the best alone."""


Command = Generate | Explain | Perplexity | Trace | Doctor | Superopt


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. SystemExit, once all ranks have ended, after SIGTERM."""
    with _ending_in_order():
        return _run_reported(arguments)


def _run_reported(arguments: Sequence[str] | None) -> int:
    """Runs a command and says what was wrong; the exit code."""
    try:
        open_streams()
        if list(sys.argv[1:] if arguments is None else arguments) == ["--version"]:
            open_console().print(f"distmega {__version__}", markup=False)
            return 0
        command = tyro.cli(Command, prog="distmega", args=arguments, description=DESCRIPTION)
        run_command(command, open_console())
        sys.stdout.flush()
    except BrokenPipeError:
        drop_output()  # nobody reads on
        return 1
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        drop_output()
        _report(
            RequestError(
                f"the output can't be written ({error.strerror})",
                expected="room where it goes",
                remedy="free some, or write it elsewhere",
            )
        )
        return 1
    except DistmegaError as error:
        _report(error)
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        return 130
    return 0


@contextmanager
def _ending_in_order() -> Iterator[None]:
    """SIGTERM ends the command as Ctrl-C does, with exit code 143. Under torchrun, whose agent ends
    its ranks so and tells how they ended, both end it at once: while a rank waits for a store or
    for its peers, Python would not heed Ctrl-C.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    if is_under_torchrun():
        number, before = signal.SIGINT, signal.signal(signal.SIGINT, signal.SIG_DFL)
    else:
        number, before = signal.SIGTERM, signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(number, before)


def _report(error: DistmegaError) -> None:
    if should_report():
        console = open_console(stderr=True)
        text = f"distmega: error: {error.with_flags(FLAGS)}"
        width = console.width if console.is_terminal else 0  # one line for programs that read it
        with suppress(OSError):  # nobody can be told; the exit code still says it
            console.file.write(wrap_text(text, width) + "\n")
            console.file.flush()


def run_command(command: Command, console: Console) -> None:
    """Does what the command says; raises DistmegaError."""
    match command:
        case Generate():
            _generate(command, console)
        case Explain():
            _explain(command, console)
        case Perplexity():
            _perplexity(command, console)
        case Doctor():
            _doctor(command, console)
        case Trace():
            _trace(command, console)
        case Superopt():
            _superopt(command, console)


def _generate(command: Generate, console: Console) -> None:
    options, tp = _launcher_options(command.ranks)
    prompts = tuple(map(read_argument, command.prompts))
    if command.prompts_file:
        prompts += tuple(filter(str.strip, split_lines(_read_text(command.prompts_file))))
    request = GenerateRequest(
        model=command.model,
        prompts=prompts,
        tp=tp,
        pp=command.ranks.pp,
        max_new_tokens=command.max_new_tokens,
        chat=command.chat,
        sampling=command.sampling,
        stop=tuple(map(read_argument, command.stop)),
        ignore_eos=command.ignore_eos,
        options=command.engine,
    )
    mesh = model_mesh(request.tp, request.pp)
    check_model(request.model, mesh, request.options, options, request.max_new_tokens)
    start, started = time.monotonic(), False
    opened = start
    for value in _run("distmega.engine.ranks.jobs:generate", request, options):
        match value:
            case Opened(random_weights=is_random):
                opened = time.monotonic()
                if is_random:
                    _announce_random("text", console)
            case Token(text=text) if len(prompts) == 1:
                if command.echo and not started:
                    _print_prompt(prompts[0], command.chat, console)
                started = True
                console.file.write(text)
                console.file.flush()
            case GenerateResult(answers=answers) as result:
                if len(prompts) == 1:
                    console.file.write(answers[0].tail + "\n")
                else:
                    _print_answers(prompts, result, console)
                say(console, _summary(result, request.tp * request.pp, opened - start))


def _announce_random(what: str, console: Console) -> None:
    console.print(f"[random weights: the {what} means nothing]", markup=False)


def _print_prompt(prompt: str, is_question: bool, console: Console) -> None:
    """Before what continues it, or on a line of its own before what answers it."""
    console.file.write(f"> {prompt}\n" if is_question else prompt)


def _print_answers(prompts: Sequence[str], result: GenerateResult, console: Console) -> None:
    """Each prompt as a heading, its answer below."""
    for prompt, answer in zip(prompts, result.answers, strict=True):
        console.rule(Text(" ".join(prompt.split())), align="left")
        console.file.write(answer.text + "\n")


def _summary(result: GenerateResult, num_ranks: int, start_s: float) -> str:
    """One line of figures; start_s: seconds until the ranks ran."""
    num_tokens = sum(len(answer.ids) for answer in result.answers)
    num_prompt_tokens = sum(answer.num_prompt_tokens for answer in result.answers)
    ranks = counted(num_ranks, "rank")
    rate = f"{result.tokens_per_s:.1f} tokens/s, " if result.tokens_per_s else ""
    second = f", the second {result.second_token_s:.2f} s later" if result.second_token_s else ""
    return (
        f"[{counted(num_tokens, 'token')} after {num_prompt_tokens} on {ranks}: {rate}"
        f"first token after {result.first_token_s:.2f} s{second}; "
        f"starting {start_s:.1f} s, loading {result.load_s:.1f} s]"
    )


def _explain(command: Explain, console: Console) -> None:
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


def _perplexity(command: Perplexity, console: Console) -> None:
    options, tp = _launcher_options(command.ranks)
    request = ScoreRequest(
        model=command.model,
        text=_read_text(command.file),
        tp=tp,
        pp=command.ranks.pp,
        options=command.engine,
    )
    check_model(request.model, model_mesh(request.tp, request.pp), request.options, options)
    for value in _run("distmega.engine.ranks.jobs:score", request, options):
        if value == Opened(random_weights=True):
            _announce_random("figure", console)
        elif isinstance(value, ScoreResult):
            console.print(
                f"perplexity {value.perplexity:.3f} over {counted(value.num_tokens, 'token')}"
            )


def _trace(command: Trace, console: Console) -> None:
    options, tp = _launcher_options(command.ranks)
    if command.ranks.pp > 1:
        raise RequestError(
            f"a trace of {counted(command.ranks.pp, 'stage')}",
            expected="one",
            remedy="leave out --pp",
        )
    request = TraceRequest(
        model=command.model,
        path=str(command.out.absolute()),
        num_steps=command.steps,
        position=command.context,
        tp=tp,
        options=command.engine,
    )
    check_model(request.model, model_mesh(request.tp, 1), request.options, options)
    for value in _run("distmega.engine.ranks.jobs:trace", request, options):
        if isinstance(value, TraceResult):
            end = (
                f"[{counted(value.num_spans, 'span')} in {command.out}; open it in ui.perfetto.dev]"
            )
            console.print(value.summary, end, sep="\n", markup=False)


def _doctor(command: Doctor, console: Console) -> None:
    facts = gather_facts()
    findings = examine(facts)
    for finding in findings:
        say(console, str(finding))
    num_problems = sum(finding.state == "problem" for finding in findings)
    if num_problems:
        raise LaunchError(
            f"{counted(num_problems, 'problem')} of this machine",
            expected="none",
            remedy="follow the remedies above",
        )
    if command.calibrate:
        for finding in calibrate_machine(facts):
            say(console, str(finding))


def _superopt(command: Superopt, console: Console) -> None:
    numbers = command.slack, command.kernels - 1, command.kept - 1, command.budget, command.seed
    if min(numbers) < 0:
        raise RequestError(
            f"--slack {command.slack} --kernels {command.kernels} --kept {command.kept} "
            f"--budget {command.budget} --seed {command.seed}",
            expected="kernels and kept of at least 1, none below 0",
            remedy="correct these",
        )
    limits = SearchLimits(
        slack=command.slack,
        max_kernels=command.kernels,
        num_kept=command.kept,
        budget_s=command.budget,
    )
    request = SuperoptRequest(
        program=command.program,
        machine=MACHINES[command.machine],
        out=command.out,
        limits=limits,
        seed=command.seed,
        full=command.full,
    )
    run_superopt(request, console, open_console(stderr=True))


def _launcher_options(ranks: Ranks) -> tuple[LauncherOptions, int]:
    """What the launcher is asked, and the ranks of each stage; the ranks of a stage go together."""
    require_whole("tp", ranks.tp, 0, MAX_DEGREE)
    require_whole("pp", ranks.pp, 1, MAX_DEGREE)
    launcher = choose_launcher(ranks.launcher)
    least = 0 if launcher == "torchrun" else ranks.pp
    num_ranks = choose_num_ranks(launcher, ranks.tp * ranks.pp or least)
    if num_ranks % ranks.pp:
        raise RequestError(
            f"{counted(num_ranks, 'rank')} in {counted(ranks.pp, 'stage')}",
            expected="as many ranks in each stage",
            remedy="correct --pp or the number of ranks",
        )
    tp = num_ranks // ranks.pp
    options = LauncherOptions(
        launcher=launcher,
        device=choose_device(ranks.device, launcher),
        max_restarts=ranks.max_restarts,
    )
    return reserve_ranks(options, tp, ranks.pp), tp


def _run(target: str, request: object, options: LauncherOptions) -> Iterator[object]:
    if not is_under_torchrun():  # whose ranks log for themselves
        level = read_settings().log.upper()
        logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
    console = open_console(stderr=True)
    num = options.num_ranks
    values = (event.value for event in launch(target, request, options))
    first = f"starting {counted(num, 'rank')}"
    yield from show_loading(values, console, first)


def _read_text(path: Path) -> str:
    if path == STDIN and is_under_torchrun():
        raise RequestError(
            "standard input of ranks that torchrun started",
            expected="a file, which all of them can read",
            remedy="write the text to a file, or start without torchrun",
        )
    return read_text(path)
