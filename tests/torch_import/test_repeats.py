"""Layers that do the same: traced once, and the program that all of them give."""

import random
import re
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager

import psutil
import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, LlamaConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from distmega import CPU, DeviceMesh, plan_program
from distmega.errors import CaptureError
from distmega.program.text import print_program
from distmega.program.types import Program
from distmega.sharding.search.search import AxisSearch
from distmega.torch_import import exported
from distmega.torch_import.conversion import convert
from distmega.torch_import.exported import export_module
from distmega.torch_import.forms import rotations
from distmega.torch_import.huggingface.decoders import HfDecoder, open_decoder
from distmega.torch_import.repeats import find_kinds
from tests.torch_import.families import FAMILIES
from tests.torch_import.huggingface.test_decoders import CONTEXT, family_config
from tests.torch_import.more_families import MORE_FAMILIES

EVERY = {**FAMILIES, **MORE_FAMILIES}
ONE_SEQUENCE = "roformer", "trocr"
"""Those that count positions from a cache's length, and so take no batches."""


def unfolded(decoder: HfDecoder, monkeypatch: pytest.MonkeyPatch, **options: object) -> Program:
    """The program of a decoder all of whose layers are traced."""
    with monkeypatch.context() as patch:
        patch.setattr(exported, "find_kinds", lambda *given: [])
        return decoder.build(**options)


def plain(program: Program) -> str:
    """Its text; torch numbers what stands outside of modules by the length of the whole graph."""
    return re.sub(r"\b([a-z_]+)_\d+\b", r"\1", print_program(program))


@contextmanager
def counted(patch: pytest.MonkeyPatch, owner: object, name: str):
    """Counts calls of a function."""
    calls: Counter[str] = Counter()
    function: Callable = getattr(owner, name)

    def counting(*given: object, **named: object) -> object:
        calls[name] += 1
        return function(*given, **named)

    with patch.context() as inner:
        inner.setattr(owner, name, counting)
        yield calls


def test_folded_layers_give_the_program_of_all(monkeypatch: pytest.MonkeyPatch):
    decoder = open_decoder(family_config("falcon-alibi"))
    decode = {"num_tokens": 1, "max_context": CONTEXT, "batch": 2}
    assert plain(decoder.build(**decode)) == plain(unfolded(decoder, monkeypatch, **decode))


@pytest.mark.nightly
@pytest.mark.parametrize("name", EVERY)
def test_every_family_gives_the_program_of_all(name: str, monkeypatch: pytest.MonkeyPatch):
    config = EVERY[name](random.Random(1))
    decoder = open_decoder(config)
    decode = {"num_tokens": 1, "max_context": CONTEXT}
    prompt = {"num_tokens": 5, "max_context": CONTEXT, "prompt": True, "batch": 2}
    several = () if name in ONE_SEQUENCE else (decode | {"batch": 2}, prompt)
    for options in (decode, *several):
        assert plain(decoder.build(**options)) == plain(unfolded(decoder, monkeypatch, **options))


def test_each_kind_of_layer_is_traced_compared_and_planned_once(monkeypatch: pytest.MonkeyPatch):
    """However many layers there are."""
    config = FAMILIES["llama"](random.Random(0))
    config.num_hidden_layers = 6
    decoder = open_decoder(config)
    export = torch.export.export
    traced: Counter[str] = Counter()

    def exporting(module: nn.Module, *given: object, **named: object) -> object:
        with counted(monkeypatch, LlamaMLP, "forward") as calls:
            found = export(module, *given, **named)
        traced.update(calls)
        return found

    monkeypatch.setattr(torch.export, "export", exporting)
    with counted(monkeypatch, rotations, "_turn") as turns:
        program = decoder.build(1, CONTEXT)
    assert traced["forward"] == 1
    assert turns["_turn"] == 1
    assert len([op for op in program.ops if op.kind == "attention"]) == 6
    config.num_hidden_layers = 4
    programs = {4: open_decoder(config).build(1, CONTEXT), 6: program}
    solved = {}
    for num_layers, each in programs.items():
        with counted(monkeypatch, AxisSearch, "advance") as calls:
            plan_program(each, DeviceMesh(tp=2), CPU)
        solved[num_layers] = calls["advance"]
    assert 0 < solved[4] == solved[6]


def test_layers_are_of_one_kind_only_if_they_do_the_same():
    def kinds(config: PretrainedConfig) -> list[int]:
        decoder = open_decoder(config)
        found: list[int] = []

        def looking(*given: object) -> list:
            made = find_kinds(*given)
            found.extend(len(kind.layers) for kind in made)
            raise InterruptedError("seen enough")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(exported, "find_kinds", looking)
            with pytest.raises(CaptureError, match="seen enough"):
                decoder.build(1, CONTEXT)
        return found

    config = family_config("gemma2")
    config.num_hidden_layers, config.layer_types = 4, ["sliding_attention", "full_attention"] * 2
    assert kinds(config) == [2, 2]
    scaled = GPT2Config(
        vocab_size=61, n_embd=32, n_layer=3, n_head=4, n_positions=64,
        scale_attn_by_inverse_layer_idx=True,
    )  # fmt: skip
    assert kinds(scaled) == []
    scaled.scale_attn_by_inverse_layer_idx = False
    assert kinds(scaled) == [3]


class Tower(nn.Module):
    """Layers of two widths; one of them adds what an earlier one gave."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part(width) for width in (8, 8, 6, 8, 6))

    def forward(self, x: Tensor) -> Tensor:
        first = self.parts[0](x, x)
        for part in self.parts[1:]:
            x = part(x, first)
        return x


class Part(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, width), nn.Linear(width, 4)
        self.register_buffer("calls", torch.zeros(4))

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        self.calls += 1
        return x + self.down(torch.relu(self.up(x))) * self.calls + other


def test_layers_of_any_module_that_update_buffers():
    torch.manual_seed(0)
    tower, x = Tower().eval(), torch.randn(3, 4)
    layers = [(f"parts.{n}",) for n in range(5)]
    found = find_kinds(tower, (x,), {}, layers)
    assert [[path for (path,) in kind.layers] for kind in found] == [
        ["parts.1", "parts.3"], ["parts.2", "parts.4"],
    ]  # fmt: skip
    program = convert(export_module(tower, (x,), {}, layers), "tower").program
    assert str(program) == str(convert(export_module(tower, (x,), {}), "tower").program)
    assert len(program.with_role("state")) == 5


@pytest.mark.nightly
@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(
            vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
            num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192,
        ),
        GPT2Config(n_embd=1280, n_layer=32, n_head=20),
    ],
    ids=["llama-8b", "gpt2"],
)  # fmt: skip
def test_a_large_decoder_is_built_without_its_weights(config: PretrainedConfig):
    """Their memory is asked for and never touched."""
    decoder = open_decoder(config)
    before = resident_bytes()
    program = decoder.build(1, 1024, dtype="bf16")
    plan_program(program, DeviceMesh(tp=2), CPU)
    largest = max(x.num_elements for x in program.with_role("weight"))
    assert resident_bytes() - before < 2 * largest


def resident_bytes() -> int:
    """Memory that this process has touched and holds."""
    return psutil.Process().memory_info().rss
