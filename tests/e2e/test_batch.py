"""Sequences of different lengths decoded together, each as transformers has it alone."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distmega.cli.main import main
from distmega.engine.engine import Engine
from distmega.engine.requests import EngineOptions
from distmega.errors import RequestError
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.launch.contract import LauncherOptions, Result
from distmega.launch.launchers import launch
from distmega.models.sampling import MOST_LIKELY, Sampling
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sources.load import open_model
from tests.calls import num_calls
from tests.e2e.running import relative_error
from tests.e2e.targets import MeasureBatch
from tests.models.files import FAMILIES

TOLERANCE = 1e-4
LENGTHS = (40, 1, 17)
NUM_DECODED = 12


def sequences() -> list[list[int]]:
    """Token ids of each sequence, prompt and what is appended."""
    generator = torch.Generator().manual_seed(5)
    sizes = [length + NUM_DECODED for length in LENGTHS]
    return [torch.randint(0, 288, (size,), generator=generator).tolist() for size in sizes]


@pytest.mark.parametrize(
    ("name", "num_ranks"), [("llama", 2), ("qwen2", 1), ("qwen3", 2), ("mistral", 1)]
)
def test_each_sequence_is_as_alone(name: str, num_ranks: int, tmp_path: Path) -> None:
    model = FAMILIES[name].build()
    model.save_pretrained(tmp_path / name)
    request = MeasureBatch(
        model=str(tmp_path / name),
        sequences=sequences(),
        num_decoded=NUM_DECODED,
        options=EngineOptions(max_context=64, num_sms=4, batch=4),
    )
    options = LauncherOptions(launcher="local", num_ranks=num_ranks, timeout_s=120.0, device="cpu")
    *_, last = launch("tests.e2e.targets:measure_batch", request, options)
    assert isinstance(last, Result)
    for ids, found in zip(sequences(), last.value, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits[0, -NUM_DECODED:].float().numpy()
        assert relative_error(found, expected) < TOLERANCE


def open_tiny(batch: int, sampling: Sampling = MOST_LIKELY) -> Engine:
    mesh = DeviceMesh(tp=1)
    options = EngineOptions(max_context=32, num_sms=3, batch=batch)
    comm = SingleCommunicator(mesh)
    return Engine(open_model("tiny-llama"), mesh, comm, options, sampling=sampling)


def test_a_token_takes_a_bounded_number_of_calls() -> None:
    """Of Python and of C, some 730 a layer."""
    engine = open_tiny(1)

    def calls_of(num_tokens: int) -> int:
        return num_calls(lambda: [*engine.generate([5, 6], num_tokens, ignore_eos=True)])

    calls_of(4)  # what is made once
    few, many = calls_of(4), calls_of(14)
    assert many - few < 10 * 900 * engine.decode_plan.config.num_layers


def test_generating_together_equals_generating_alone() -> None:
    prompts = [[5, 6, 7, 8, 9], [3], [11, 12, 13]]
    together = open_tiny(4)
    assert together.uses_megakernel
    found = [list(tokens) for tokens in zip(*together.generate_all(prompts), strict=True)]
    again = [list(tokens) for tokens in zip(*together.generate_all(prompts[::-1]), strict=True)]
    alone = open_tiny(1)
    for prompt, tokens, other in zip(prompts, found, again[::-1], strict=True):
        assert tokens == list(alone.generate(prompt))[: len(tokens)]
        assert other == tokens
        assert len(tokens) == 32 - max(map(len, prompts)) + 1


def test_a_limit_ends_the_tokens() -> None:
    engine = open_tiny(2)
    every = list(engine.generate_all([[5, 6, 7], [8]]))
    assert list(engine.generate_all([[5, 6, 7], [8]], 4)) == every[:4]
    assert list(engine.generate_all([[5, 6, 7], [8]], 1000)) == every


def test_each_sequence_draws_with_a_seed_of_its_own() -> None:
    """The same prompt thrice: different answers, each that of its seed alone."""
    sampling = Sampling(temperature=1.0, top_k=20, seed=7)
    steps = open_tiny(3, sampling).generate_all([[5, 6, 7]] * 3)
    found = [list(tokens) for tokens in zip(*steps, strict=True)]
    assert len(set(map(tuple, found))) == 3
    for number, tokens in enumerate(found):
        alone = open_tiny(1, replace(sampling, seed=7 + number))
        assert list(alone.generate([5, 6, 7])) == tokens


def test_more_sequences_than_slots() -> None:
    with pytest.raises(RequestError, match="slot 2; expected slots below the batch of 2"):
        list(open_tiny(2).generate_all([[1], [2], [3]]))


def test_the_command_continues_several_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = tmp_path / "prompts.txt"
    more.write_text("My favourite colour\n\n", encoding="utf-8")
    limits = ["--max-new-tokens", "4", "--max-context", "32"]
    texts = ["The capital of France is", "1, 2, 3,"]
    assert main(["generate", "tiny-llama", *texts, "--prompts-file", str(more), *limits]) == 0
    together = capsys.readouterr().out
    for text in (*texts, "My favourite colour"):
        assert f"{text} \u2500" in together
    assert main(["generate", "tiny-llama", texts[1], *limits]) == 0
    _, _, alone = capsys.readouterr().out.partition("]\n")  # behind what is said of its weights
    answer = alone.partition("\n[")[0]
    assert answer
    assert f"\u2500\n{answer}\n" in together.partition(texts[1])[2]


def test_no_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "smollm2"]) == 2
    assert "no prompt; expected at least one" in capsys.readouterr().err
