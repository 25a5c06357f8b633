"""Ids of the Hugging Face Hub: what its cache holds is taken, what it lacks is fetched or named."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from distmega.engine.requests import GenerateRequest
from distmega.errors import ModelError, RequestError
from distmega.generation import check_request
from distmega.launch.contract import LauncherOptions
from distmega.models.huggingface import hub
from distmega.sources.load import open_model
from distmega.sources.locate import locate_model, read_config
from tests.models.files import FAMILIES, save_tokenizer

NAME, COMMIT = "some-org/tiny-llama", "0123abcd"
FILES = ("config.json", "model.safetensors", "tokenizer.json")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and a tokenizer."""
    folder = tmp_path_factory.mktemp("saved")
    FAMILIES["llama"].build().save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def fill(cache: Path, saved: Path, *names: str) -> Path:
    """Puts files into the cache as the Hub's package does, as links into its blobs."""
    model = cache / "models--some-org--tiny-llama"
    snapshot = model / "snapshots" / COMMIT
    for folder in (snapshot, model / "blobs", model / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    (model / "refs" / "main").write_text(COMMIT)
    for name in names:
        shutil.copy(saved / name, model / "blobs" / name)
        (snapshot / name).symlink_to(Path("../../blobs") / name)
    return snapshot


def fetching(fetch: Callable[..., str]) -> SimpleNamespace:
    """In place of the Hub's package."""
    return SimpleNamespace(snapshot_download=fetch)


def test_a_cached_model_is_opened_without_the_package(cache, saved, monkeypatch):
    snapshot = fill(cache, saved, *FILES)
    monkeypatch.setattr(hub, "huggingface_hub", None)
    assert locate_model(NAME, "weights").path == snapshot
    source = open_model(NAME)
    assert not source.random
    assert source.weight("embed").read().shape == (288, 48)
    assert source.tokenizer().encode("ab") == [97, 98]


def test_a_configuration_alone_is_enough_to_explain(cache, saved, monkeypatch):
    fill(cache, saved, "config.json")
    monkeypatch.setattr(hub, "huggingface_hub", None)
    assert read_config(NAME).num_layers == 2
    with pytest.raises(ModelError, match=r"has it without tokenizer\.json, and huggingface-hub is"):
        open_model(NAME)


def test_what_is_missing_is_fetched(cache, saved, monkeypatch):
    asked = []

    def fetch(name: str, *, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(
            fill(cache, saved, *(FILES if "model.safetensors" in allow_patterns else FILES[:1]))
        )

    monkeypatch.setattr(hub, "huggingface_hub", fetching(fetch))
    assert read_config(NAME).hidden == 48
    assert asked.pop() == (NAME, ["config.json", "generation_config.json"])
    shutil.rmtree(cache)
    assert open_model(NAME).config.hidden == 48
    ((_, patterns),) = asked
    assert not [pattern for pattern in patterns if "bin" in pattern or pattern.startswith("*")]
    assert open_model(NAME).name == NAME
    assert len(asked) == 1


def test_prompts_are_looked_at_before_weights_are_fetched(cache, saved, monkeypatch):
    fetched = []

    def fetch(name: str, *, allow_patterns: list[str]) -> str:
        fetched.append([file for file in FILES if file in allow_patterns])
        return str(fill(cache, saved, *fetched[-1]))

    monkeypatch.setattr(hub, "huggingface_hub", fetching(fetch))
    request = GenerateRequest(model=NAME, prompts=("a" * 250,), max_new_tokens=10)
    with pytest.raises(RequestError, match="a prompt of 250 tokens and 10 new ones"):
        check_request(request, LauncherOptions(device="cpu"))
    assert fetched == [["config.json", "tokenizer.json"]]


def test_an_id_that_can_not_be_fetched_is_no_preset(cache, monkeypatch):
    def fail(name: str, **options: object) -> str:
        raise OSError("no\n  network")

    for package, reason in (
        (None, "not in the Hugging Face cache .*hub, and huggingface-hub is not installed"),
        (fetching(fail), "not in the Hugging Face cache .*hub, and can't be fetched: no network"),
        (fetching(lambda name, **_: str(cache)), r"the Hub has no config\.json for it"),
    ):
        monkeypatch.setattr(hub, "huggingface_hub", package)
        with pytest.raises(
            ModelError, match=f"no such model: 'meta/llama-3.2-1b' .{reason}"
        ) as found:
            locate_model("meta/llama-3.2-1b")
        assert "did you mean" not in str(found.value)


def test_the_package_itself_is_asked_and_its_error_told(cache, monkeypatch):
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"'some-org/none' .not in .*, and can't be fetched: "):
        open_model("some-org/none")


def test_shards_of_the_index_are_looked_for(cache, saved, monkeypatch):
    monkeypatch.setattr(hub, "huggingface_hub", None)
    snapshot = fill(cache, saved, "config.json", "tokenizer.json")
    index = '{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'
    (snapshot / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=r"without model-00001-of-00002\.safetensors"):
        locate_model(NAME, "weights")


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"HF_HUB_CACHE": "/a"}, "/a"),
        ({"HF_HOME": "/b"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
    ],
)
def test_the_cache_is_where_the_package_has_it(variables: dict[str, str], folder: str, monkeypatch):
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert hub.cache_folder() == Path(folder)


def test_files_are_no_ids():
    for name in (
        "tiny-llama",
        "./a/b",
        "../a/b",
        "/a/b",
        "a/b/c",
        "models/a.gguf",
        "a/config.json",
    ):
        assert not hub.is_hub_id(name)
    assert hub.is_hub_id(NAME)
