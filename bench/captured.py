"""Decode steps of decoders that transformers wrote, captured: distmega, and the same model by
torch.compile, alternating in one run.

    python -m bench.captured "phi-2 batch=1 ctx=512" "llama-3.2-1b batch=1 ctx=512" [--rounds 20]

A case names a shape, a batch of one and a position of the KV cache. Weights are random, bf16, the
same on both sides; cached keys are the same in all elements of a head, since captured decoders may
keep these in another order. The peer is the model of transformers under max-autotune, its calls in
a CUDA graph. Where the shape is one of our presets too, the program of the built-in decoder is a
peer. The floor is the bytes of all weights but the embedding and of the caches over the rate of a
device copy. Cases are set up at the same time, a process each, since torch compiles for minutes;
each says how long its parts took. Torch times the kernels that it chooses from under a lock. Once
all cases are ready, or --longest seconds have passed, one after the other is measured alone. Writes
bench/results/captured-<device>.json.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    Olmo2Config,
    PhiConfig,
    PretrainedConfig,
)
from transformers.cache_utils import Cache, CacheLayerMixin

from bench.cases import StepCase, read_case
from bench.options import at_least, read_options, seconds
from bench.programs import own_tensors
from bench.records import Book, Record, add_book_options, open_book
from bench.timing import Call, captured, copy_bytes_per_us, elapsed_us, in_turn
from bench.turns import tune_alone
from distmega.collecting import gc_paused
from distmega.compiled import CompiledProgram
from distmega.errors import UnsupportedError
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.kernels.machines import H200
from distmega.models.decoder import build_decoder
from distmega.models.presets import PRESETS
from distmega.program.kinds import kind_of
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.planner import plan_program
from distmega.torch_import.huggingface.decoders import HfDecoder, open_decoder

SHAPES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama-3.2-1b": lambda: LlamaConfig(
        vocab_size=128256, hidden_size=2048, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, intermediate_size=8192, rms_norm_eps=1e-5,
        max_position_embeddings=131072, tie_word_embeddings=True,
    ),
    "gpt2": GPT2Config,
    "phi-2": lambda: PhiConfig(
        vocab_size=51200, hidden_size=2560, num_hidden_layers=32, num_attention_heads=32,
        intermediate_size=10240, partial_rotary_factor=0.4, max_position_embeddings=2048,
    ),
    "gemma2-2b": lambda: Gemma2Config(
        hidden_size=2304, num_hidden_layers=26, num_attention_heads=8, num_key_value_heads=4,
        head_dim=256, intermediate_size=9216, query_pre_attn_scalar=256,
    ),
    "bloom-560m": lambda: BloomConfig(
        vocab_size=250880, hidden_size=1024, n_layer=24, n_head=16
    ),
    "olmo2-1b": lambda: Olmo2Config(
        vocab_size=100352, hidden_size=2048, num_hidden_layers=16, num_attention_heads=16,
        intermediate_size=8192, max_position_embeddings=4096,
    ),
    "granite-2b": lambda: GraniteConfig(
        vocab_size=49155, hidden_size=2048, num_hidden_layers=40, num_attention_heads=32,
        num_key_value_heads=8, intermediate_size=8192, embedding_multiplier=12.0,
        logits_scaling=8.0, residual_multiplier=0.22, attention_multiplier=0.015625,
        max_position_embeddings=4096, tie_word_embeddings=True,
    ),
}  # fmt: skip
CASES = tuple(f"{name} batch=1 ctx=512" for name in SHAPES)
STEPS = 16
"""Calls between two events."""
TOLERANCE = 0.06
"""Of the largest logit, both sides in bf16 through all layers."""


def parse_case(text: str) -> StepCase:
    """Reads "SHAPE batch=1 ctx=N"."""
    case = StepCase(text, *read_case(text, "batch", "ctx"))
    if case.model not in SHAPES or case.batch != 1 or case.num_ranks != 1:
        expected = f"one of {', '.join(SHAPES)} batch=1 ctx=N"
        raise SystemExit(f"case {text!r}; expected {expected}; correct it")
    return case


class FixedLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values [1, h, t, d], written at one position."""

    is_sliding = False
    is_compileable = True

    def __init__(self, keys: Tensor, values: Tensor, position: Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.position = keys, values, position
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the caches are there."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes one row of each, and gives all."""
        self.keys.index_copy_(2, self.position, key_states)
        self.values.index_copy_(2, self.position, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, *args: Any) -> tuple[int, int]:
        return self.keys.shape[2], 0

    def get_seq_length(self, *args: Any) -> int:
        """The row is the last."""
        return self.keys.shape[2] - 1

    def get_max_length(self) -> int:
        return self.keys.shape[2]

    def get_max_cache_shape(self) -> int:
        """As older releases call get_max_length."""
        return self.keys.shape[2]


def random_model(config: PretrainedConfig) -> nn.Module:
    """On the GPU, weights scaled to keep values around 1."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, max(parameter.shape) ** -0.5)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to("cuda").eval()


def open_step(program: Program) -> tuple[CompiledProgram, str]:
    """The program as one kernel, or as what it can be, and why it is not."""
    comm = SingleCommunicator(DeviceMesh(tp=1))
    plan = plan_program(program, comm.mesh, H200, {})
    device = f"cuda:{torch.cuda.current_device()}"
    try:
        return CompiledProgram(plan, comm, device, warm=True, megakernel=True), ""
    except UnsupportedError as error:
        return CompiledProgram(plan, comm, device, warm=True, megakernel=False), str(error)


def captured_tensors(decoder: HfDecoder, program: Program, model: nn.Module) -> dict[str, Tensor]:
    """The model's weights as the program names them."""
    stored = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    found = {}
    for tensor in program.with_role("weight"):
        name = tensor.name
        if name in decoder.constants:
            found[name] = decoder.constants[name]
        elif name in decoder.derived:
            derived = decoder.derived[name]
            found[name] = derived.of(stored[decoder.targets[derived.source]].detach())
        else:
            found[name] = stored[decoder.targets[name]].detach()
    return found


def caches(decoder: HfDecoder, num: int) -> list[Tensor]:
    """Keys and values of layers in turn, [h, t, d]; keys are equal in all elements of a head."""
    found = []
    for shape in decoder.shapes:
        width = shape.dim if shape.number % 2 else 1
        x = torch.randn(shape.num_heads, num, width, device="cuda", dtype=torch.bfloat16)
        found.append(0.3 * x.expand(-1, -1, shape.dim).contiguous())
    return found


def peer_step(model: nn.Module, cached: list[Tensor], position: Tensor, token: Tensor) -> Call:
    """One step of the model over caches of its own; gives logits."""
    layers = [
        FixedLayer(keys[None].clone(), values[None].clone(), position)
        for keys, values in zip(cached[::2], cached[1::2], strict=True)
    ]
    cache = Cache(layers=layers)

    def step() -> Tensor:
        with torch.no_grad():
            out: Tensor = model(
                input_ids=token[None], position_ids=position[None], past_key_values=cache,
                use_cache=True,
            ).logits[0]  # fmt: skip
        return out

    return step


def step_bytes(program: Program) -> int:
    """Weights without embeddings that nothing else reads, and caches."""
    only_looked_up = {op.reads[1].tensor for op in program.ops if kind_of(op).looks_up_rows}
    only_looked_up -= {
        read.tensor for op in program.ops if not kind_of(op).looks_up_rows for read in op.reads
    }
    tables = {op.reads[3].tensor for op in program.ops if kind_of(op).rotates}
    return sum(
        tensor.num_bytes
        for tensor in program.tensors
        if tensor.role in ("weight", "state") and tensor.name not in only_looked_up | tables
    )


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is timed of a case, by name, and the bytes of its floor."""

    runs: dict[str, Call]
    num_bytes: int


@gc_paused
def compile_peer(step: Call) -> Call:
    """The step by torch.compile, in a graph of ours; torch makes millions of objects for it, among
    which collections would look for cycles for a third of the time.
    """
    graph, _ = captured(torch.compile(step, mode="max-autotune-no-cudagraphs"))
    return graph.replay


def prepare(case: StepCase, with_peer: bool) -> Prepared:
    """Compiles a case's sides and compares their logits."""
    start = time.monotonic()
    config = SHAPES[case.model]()
    decoder = open_decoder(config)
    program = decoder.build(1, case.context, dtype="bf16")
    assert not decoder.opaque, decoder.opaque
    step, why = open_step(program)
    if why:
        print(f"{case.text} is not one kernel: {why}", flush=True)
    model = random_model(config)
    weights, cached = captured_tensors(decoder, program, model), caches(decoder, case.context)
    states = {tensor.name: tensor for tensor in program.with_role("state")}
    for name, tensor in step.tensors.items():
        if name in states:
            layer, letter = name.split(".")[1:]
            tensor.copy_(cached[2 * int(layer) + "kv".index(letter[0])])
        elif name in weights:
            tensor.copy_(weights[name])
    position, token = (torch.tensor([n], device="cuda") for n in (case.context - 1, 7))
    inputs: Mapping[str, Tensor] = {"tokens": token, "positions": position}
    step.bind(inputs)  # read where they are, as the peers do
    runs: dict[str, Call] = {"ours": lambda: step(inputs)}
    eager = peer_step(model, cached, position, token)
    logits = eager().float()[-1]
    (chosen,) = step(inputs).values()
    far = float((logits.max() - logits[chosen[0]]) / logits.abs().max())
    print(f"{case.text}: token {far:.4f} of the largest logit from torch's", flush=True)
    assert far < TOLERANCE, far
    if case.model in PRESETS:
        built = build_decoder(PRESETS[case.model], 1, case.context, dtype="bf16")
        own, _ = open_step(built)
        for name, tensor in own_tensors(own, 0, case.context - 1).items():
            if name in own.tensors:
                own.tensors[name].copy_(tensor)
        own.bind(inputs)
        runs["built-in"] = lambda: own(inputs)
    said = f"{case.text}: ours set up in {time.monotonic() - start:.0f} s"
    if with_peer:
        runs["torch.compile"] = compile_peer(eager)
    print(f"{said}, all in {time.monotonic() - start:.0f} s", flush=True)
    for run in runs.values():
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    return Prepared(runs, step_bytes(program))


def measure(case: StepCase, prepared: Prepared, rounds: int) -> Record:
    """Medians over rounds in which each is timed once."""
    times: dict[str, list[float]] = {name: [] for name in prepared.runs}
    for name, run in in_turn(prepared.runs, rounds):
        times[name].append(elapsed_us(lambda run=run: [run() for _ in range(STEPS)], STEPS))
    medians = {name: round(statistics.median(found), 1) for name, found in times.items()}
    ours_us = medians.pop("ours")
    return Record(
        case=case.text,
        device=torch.cuda.get_device_name(),
        num_gpus=1,
        ours_us=ours_us,
        peers=medians,
        floor_us=round(prepared.num_bytes / copy_bytes_per_us(), 1),
    )


def work(text: str, rounds: int, with_peer: bool, tuning: Path, pipe: Connection) -> None:
    """A case's process: says that it is ready, waits for its turn, sends the record; where it
    fails, what failed.
    """
    try:
        case = parse_case(text)
        tune_alone(tuning)
        prepared = prepare(case, with_peer)
        pipe.send(None)
        pipe.recv()
        pipe.send(measure(case, prepared, rounds))
    except Exception:
        pipe.send(traceback.format_exc())


def run_cases(
    cases: Sequence[str], rounds: int, with_peer: bool, longest: float, book: Book
) -> int:
    """Sets up all cases at once, measures one after the other; how many have no record."""
    spawn = multiprocessing.get_context("spawn")
    start = time.monotonic()
    texts: dict[Connection, str] = {}
    processes: dict[Connection, BaseProcess] = {}
    ready: list[Connection] = []
    share = max(1, (os.cpu_count() or 1) // len(cases))
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.dict(os.environ, {"TORCHINDUCTOR_COMPILE_THREADS": str(share)}),
    ):
        for text in cases:
            mine, theirs = spawn.Pipe()
            given = text, rounds, with_peer, Path(folder) / "tuning", theirs
            processes[mine] = spawn.Process(target=work, args=given, daemon=True)
            processes[mine].start()
            theirs.close()
            texts[mine] = text
        waiting = list(texts)
        while waiting and (left := start + longest - time.monotonic()) > 0:
            for pipe in wait(waiting, left):
                assert isinstance(pipe, Connection), "as given"
                waiting.remove(pipe)
                if said := received(pipe):
                    print(f"{texts[pipe]}: {said}", flush=True)
                else:
                    took = time.monotonic() - start
                    print(f"{texts[pipe]}: ready after {took:.0f} s", flush=True)
                    ready.append(pipe)
        for pipe in waiting:
            print(f"{texts[pipe]}: not ready in {longest:.0f} s", flush=True)
            processes[pipe].terminate()
        num_found = 0
        for pipe in ready:
            pipe.send(None)
            record = received(pipe)
            if isinstance(record, Record):
                book.write("captured", record)
                num_found += 1
            print(record, flush=True)
            processes[pipe].join()  # so that its end disturbs no other one
    return len(cases) - num_found


def received(pipe: Connection) -> Record | str | None:
    """What a process sent; where it ended, so."""
    try:
        said: Record | str | None = pipe.recv()
    except EOFError:
        return "the process ended"
    return said


def main() -> None:
    """Measures the cases that the command line names, all if none."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=CASES)
    parser.add_argument("--rounds", type=at_least(1), default=20)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--longest", type=seconds, default=600.0, help="seconds for setting up")
    add_book_options(parser)
    given = read_options(parser)
    for text in given.cases:
        parse_case(text)
    book = open_book(given.results, given.commit)
    failed = run_cases(given.cases, given.rounds, not given.no_peer, given.longest, book)
    if failed:
        sys.exit(f"{failed} cases without a record, as said above")


if __name__ == "__main__":
    main()
