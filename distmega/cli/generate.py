"""`distmega generate`: continues prompts, one as it comes, several once all are done.

Next: distmega/engine/ranks/jobs.py for what each rank does.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.console import Console
from rich.text import Text

from distmega.cli.flags import EngineFlags, Model, OptionalFile, RankFlags, Ranks
from distmega.cli.starting import (
    announce_random_weights,
    launcher_options,
    read_shared_text,
    run_ranks,
)
from distmega.cli.streams import read_argument, say, split_lines
from distmega.engine.requests import EngineOptions, GenerateRequest, GenerateResult, Opened, Token
from distmega.errors import counted
from distmega.generation import check_request
from distmega.models.sampling import Sampling

SamplingFlags = Annotated[Sampling, tyro.conf.arg(name="", prefix_name=False)]
Prompts = Annotated[
    tuple[str, ...],
    tyro.conf.Positional,
    tyro.conf.arg(metavar="[PROMPT ...]", help_behavior_hint=""),
]
Texts = Annotated[tuple[str, ...], tyro.conf.arg(metavar="[TEXT ...]", help_behavior_hint="")]


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


def run_generate(command: Generate, console: Console) -> None:
    """Starts ranks and prints what they answer."""
    options, tp = launcher_options(command.ranks)
    prompts = tuple(map(read_argument, command.prompts))
    if command.prompts_file:
        prompts += tuple(filter(str.strip, split_lines(read_shared_text(command.prompts_file))))
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
    check_request(request, options)
    start, started = time.monotonic(), False
    opened = start
    for value in run_ranks("distmega.engine.ranks.jobs:generate", request, options):
        match value:
            case Opened(random_weights=is_random):
                opened = time.monotonic()
                if is_random:
                    announce_random_weights("text", console)
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
