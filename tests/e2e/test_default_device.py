"""What a program, a model or a module computes is the same whatever torch's default device is: here
"meta", which stands for a GPU that the caller has made the default.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import distmega
from distmega.program.types import Program
from distmega.torch_import.huggingface.decoders import open_decoder
from tests.e2e.test_library import CPU_RANK
from tests.models.files import FAMILIES
from tests.torch_import.huggingface.test_decoders import family_config


def in_both(run: Callable[[], Any]) -> tuple[Any, Any]:
    """Results with the CPU as the default device, and with another one."""
    expected = run()
    with torch.device("meta"):
        return expected, run()


def test_an_engine_reads_a_folder_with_a_head_beside_the_embedding(tmp_path: Path) -> None:
    FAMILIES["qwen2"].build().to(torch.bfloat16).save_pretrained(tmp_path)

    def tokens() -> list[int]:
        source, options = distmega.open_model(tmp_path), distmega.EngineOptions(max_context=16)
        return [*distmega.open_engine(CPU_RANK, source, 1, options).generate([1, 2], 4)]

    expected, found = in_both(tokens)
    assert found == expected


def test_a_decoder_of_transformers() -> None:
    def program() -> Program:
        return open_decoder(family_config("gpt2")).build(1, 8)

    expected, found = in_both(program)
    assert found == expected


def test_a_module_whose_forward_makes_tensors() -> None:
    module, x = nn.LSTM(4, 4).eval(), torch.randn(2, 1, 4)
    expected, found = in_both(lambda: distmega.capture(module, (x,)).compile()(x)[0])
    assert torch.equal(found, expected)
