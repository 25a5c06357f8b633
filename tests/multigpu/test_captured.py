"""Captured decoders on several ranks: the tokens of one rank and of transformers."""

import gc
import importlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distmega.engine.engine import Engine
from distmega.engine.requests import EngineOptions
from distmega.hostir.comm.communicator import Communicator, SingleCommunicator
from distmega.models.text.tokenizer import byte_tokenizer
from distmega.models.weights.tensors import Slices
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sources.load import ModelSource

HERE = "tests.multigpu.test_captured"
NUM_PROMPT, CONTEXT = 7, 160
MOST_ERROR = 1.5
"""Times the error of transformers in bf16."""
WIDE = ("gpt2", "phi-2", "gemma2-2b", "olmo2-1b", "granite-2b")
"""Shapes of bench/captured.py, of which two layers run on GPUs."""
ONE_KERNEL = ("phi-2", "gemma2-2b", "granite-2b")
"""Those whose steps are one kernel on several ranks too."""


@dataclass(frozen=True, slots=True)
class Held:
    """A weight in memory."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def read(self, slices: Slices = ()) -> Any:
        """The part that `slices` select, as float32."""
        return self.tensor[tuple(slices)].float().cpu().clone().numpy()


def small_config(name: str) -> Any:
    """Of two layers: a wide shape, its vocabulary smaller and odd, or one of small_decoders.py.

    Imports transformers, which takes seconds and other bodies' ranks do without.
    """
    if name not in WIDE:
        return importlib.import_module("tests.torch_import.small_decoders").DECODERS[name]()
    config = importlib.import_module("bench.captured").SHAPES[name]()
    config.num_hidden_layers = 2
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    config.vocab_size = 4099
    return config


def open_random(name: str, device: str) -> tuple[ModelSource, nn.Module]:
    """A captured decoder with random weights, and the model of transformers that has them."""
    decoders, source = (
        importlib.import_module(f"distmega.torch_import.huggingface.{part}")
        for part in ("decoders", "source")
    )
    transformers = importlib.import_module("transformers")
    config = small_config(name)
    dtype = torch.bfloat16 if device != "cpu" else torch.float32
    # older releases leave a soft cap out of torch's own attention
    attention = "eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa"
    torch.manual_seed(0)
    with torch.device(device), torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention
        )
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, max(parameter.shape) ** -0.5)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model = model.to(device).eval()
    decoder = decoders.open_decoder(config)
    stored = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    held = {target: Held(tensor.detach()) for target, tensor in stored.items()}
    opened = ModelSource(
        name=name,
        config=decoder,
        readers=source.Readers(decoder, held),
        make_tokenizer=lambda: byte_tokenizer(config.vocab_size),
    )
    return opened, model


def greedy(engine: Engine, ids: list[int]) -> list[int]:
    """64 tokens; of the interpreter, which takes a second for some, fewer."""
    num = 64 if engine.device.type == "cuda" else 12
    return list(itertools.islice(engine.generate(ids, ignore_eos=True), num))


def decode_as_one_rank(comm: Communicator, name: str) -> None:
    """See compare; an engine's own tensors name their device."""
    device = str(torch.get_default_device())
    with torch.device("cpu"):
        compare(comm, name, device)


def compare(comm: Communicator, name: str, device: str) -> None:
    """Logits of given tokens are as exact as those of transformers in the same type; greedy tokens
    are those of one rank and of transformers, as long as rounding can't decide.
    """
    source, model = open_random(name, device)
    vocab = source.config.vocab
    options = EngineOptions(max_context=CONTEXT, timeout_s=20.0)
    ids = torch.randint(3, vocab, (NUM_PROMPT,), generator=torch.Generator().manual_seed(3))
    prompt = ids.tolist()
    engines = {
        "one rank": SingleCommunicator(DeviceMesh(tp=1)),
        "all ranks": comm,
    }
    tokens: dict[str, list[int]] = {}
    rows: dict[str, Tensor] = {}
    for who, its_comm in engines.items():
        engine = Engine(source, its_comm.mesh, its_comm, options, device=device, logits="last")
        assert not source.config.opaque
        if device != "cpu":
            one = who == "one rank" or name in ONE_KERNEL
            assert not one or (engine.uses_megakernel and engine.stepping is not None), who
        tokens[who] = greedy(engine, prompt)
        engine.prefill(prompt)
        steps = [engine.decode_step([token])["logits"] for token in tokens["one rank"][:-1]]
        rows[who] = torch.cat(steps).float().cpu()
        del engine
        gc.collect()
    given = torch.tensor([prompt + tokens["one rank"][:-1]], device=device)
    with torch.no_grad():
        plain = model(given).logits[0, NUM_PROMPT:].float().cpu()
        exact = model.float()(given).logits[0, NUM_PROMPT:].cpu()
    rounded = worst(plain, exact)
    errors = {who: worst(found, exact) for who, found in rows.items()}
    doubt = 2 * max(float((found - exact).abs().max()) for found in (*rows.values(), plain))
    num, same = len(given[0]) - NUM_PROMPT + 1, first_difference(*tokens.values())
    if comm.rank == 0:
        print(
            f"{name}: {same} of {num} tokens as one rank, errors {errors}, "
            f"transformers in this type {rounded:.1e}",
            flush=True,
        )
    assert max(errors.values()) <= max(MOST_ERROR * rounded, 1e-5)
    assert same == num or margin(exact, tokens, same) < doubt, same
    chosen = torch.tensor(tokens["one rank"][1:])
    behind = exact.max(-1).values - exact.gather(1, chosen[:, None])[:, 0]
    assert float(behind.max()) <= doubt
    theirs = comm.all_gather_object((tuple(tokens["all ranks"]), rows["all ranks"].tolist()))
    assert all(one == theirs[0] for one in theirs)


def worst(found: Tensor, exact: Tensor) -> float:
    """The largest relative error of a row."""
    return float(((found - exact).norm(dim=-1) / exact.norm(dim=-1)).max())


def first_difference(one: list[int], other: list[int]) -> int:
    """How many tokens are the same before any differs."""
    pairs = enumerate(zip(one, other, strict=True))
    return next((at for at, (a, b) in pairs if a != b), len(one))


def margin(exact: Tensor, tokens: Mapping[str, list[int]], at: int) -> float:
    """By how much the two tokens' exact logits differ where the texts part."""
    if at == 0:  # the prompt's own token; both prefills run the same library ops
        return float("inf")
    row = exact[at - 1]
    return abs(float(row[tokens["one rank"][at]] - row[tokens["all ranks"][at]]))


CASES = [
    *(
        pytest.param("cpu", 2, name, id=f"cpu-2-{name}", marks=pytest.mark.nightly)
        for name in ("gpt2", "phi", "olmo2", "granite")
    ),
    *(
        pytest.param("cuda", num, name, id=f"cuda-{num}-{name}", marks=pytest.mark.multigpu(num))
        for num in (2, 4)
        for name in WIDE
    ),
]


@pytest.mark.parametrize(("device", "num_ranks", "name"), CASES)
def test_tokens_are_those_of_one_rank(device: str, num_ranks: int, name: str, run_ranks):
    run_ranks(f"{HERE}:decode_as_one_rank", device, num_ranks, name)
