"""Hugging Face folders: every family, sharded or not, in three dtypes; slices; damaged and
incomplete folders.
"""

import errno
import json
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from distmega.errors import ModelError
from distmega.models.fields import read_json
from distmega.models.weights.tensors import weight_specs
from distmega.sources.load import ModelSource, open_model
from tests.models.files import FAMILIES, save_tokenizer

Family = tuple[transformers.PreTrainedModel, Path]
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def assert_same(source: ModelSource, model: transformers.PreTrainedModel) -> None:
    state = model.state_dict()
    specs = weight_specs(source.config)
    assert set(source.readers) == {*specs, "rope_table"}
    for spec in specs.values():
        expected = state[spec.hf_name].float().numpy().reshape(spec.shape)
        np.testing.assert_array_equal(source.weight(spec.name).read(), expected, err_msg=spec.name)


def test_weights_equal(family: Family):
    model, folder = family
    assert_same(open_model(str(folder)), model)


def test_slices_are_parts(family: Family):
    source = open_model(str(family[1]))
    rng = np.random.default_rng(0)
    for name in weight_specs(source.config):
        reader = source.weight(name)
        full = reader.read()
        for _ in range(3):
            ends = [sorted(rng.integers(0, extent + 1, 2).tolist()) for extent in reader.shape]
            part = tuple(slice(*bounds) for bounds in ends)
            np.testing.assert_array_equal(reader.read(part), full[part], err_msg=f"{name} {part}")


def test_sharded(family: Family, tmp_path: Path):
    model, _ = family
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same(open_model(str(tmp_path)), model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_types(dtype: torch.dtype, tmp_path: Path):
    model = FAMILIES["qwen2"].build().to(dtype)
    model.save_pretrained(tmp_path)
    source = open_model(str(tmp_path))
    assert source.config.dtype == {torch.float16: "f16", torch.bfloat16: "bf16"}[dtype]
    assert_same(source, model)


@pytest.fixture
def copied(family: Family, tmp_path: Path) -> Path:
    return Path(shutil.copytree(family[1], tmp_path / "model"))


def test_cut_anywhere(copied: Path):
    path = copied / SINGLE
    data = path.read_bytes()
    rng = random.Random(0)
    for cut in [0, 7, len(data) - 1, *(rng.randrange(len(data)) for _ in range(20))]:
        path.write_bytes(data[:cut])
        with pytest.raises(ModelError, match=r"model\.safetensors is truncated or damaged"):
            open_model(str(copied))


def test_missing_tensors(copied: Path):
    weights = load_file(copied / SINGLE)
    for name in ("model.norm.weight", "model.layers.0.mlp.up_proj.weight"):
        del weights[name]
    save_file(weights, copied / SINGLE)
    with pytest.raises(
        ModelError, match=r"lacks 2 of \d+ weights: model\.norm\.weight, model\.layers"
    ):
        open_model(str(copied))


def save_without_head(folder: Path, *, tied: bool) -> None:
    """The model as its class without a head saves it: no name begins with "model."."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": tied}))
    weights = {
        name.removeprefix("model."): x
        for name, x in load_file(folder / SINGLE).items()
        if name != "lm_head.weight"
    }
    save_file(weights, folder / SINGLE)


def test_a_model_that_was_saved_without_its_head(family: Family, copied: Path):
    save_without_head(copied, tied=True)
    assert_same(open_model(copied), family[0])
    save_without_head(copied, tied=False)
    with pytest.raises(
        ModelError,
        match=r"holds a model without its head: it lacks lm_head\.weight; .* save it from its"
        r" class for causal language models; or, .* set tie_word_embeddings to true",
    ):
        open_model(copied)


def test_a_weight_under_both_of_its_names_is_refused(copied: Path):
    weights = load_file(copied / SINGLE)
    weights["norm.weight"] = weights["model.norm.weight"] + 1
    save_file(weights, copied / SINGLE)
    with pytest.raises(ModelError, match=r"holds 1 weight .* does not use: norm\.weight"):
        open_model(copied)


def test_unexpected_shape(copied: Path):
    weights = load_file(copied / SINGLE)
    weights["model.layers.1.self_attn.k_proj.weight"] = torch.zeros(24, 48)
    save_file(weights, copied / SINGLE)
    with pytest.raises(
        ModelError, match=r"k_proj\.weight .* has shape \[24, 48\]; expected \[48, 48\]"
    ):
        open_model(str(copied))


def test_unused_weight(copied: Path):
    weights = load_file(copied / SINGLE)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(weights, copied / SINGLE)
    open_model(str(copied))
    weights["model.layers.0.self_attn.o_proj.bias"] = torch.zeros(48)
    save_file(weights, copied / SINGLE)
    with pytest.raises(
        ModelError, match=r"does not use: model\.layers\.0\.self_attn\.o_proj\.bias"
    ):
        open_model(str(copied))


@pytest.mark.parametrize("same", [True, False])
def test_a_head_beside_tied_embeddings_is_the_embedding(copied: Path, same: bool):
    """transformers ties them only where the files have no head of their own."""
    config = json.loads((copied / "config.json").read_text())
    weights = load_file(copied / SINGLE)
    (copied / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    embedding = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] = embedding.clone() if same else embedding + 1
    save_file(weights, copied / SINGLE)
    if same:
        open_model(str(copied))
        return
    with pytest.raises(ModelError, match="set tie_word_embeddings to false"):
        open_model(str(copied))


def test_unknown_type(copied: Path):
    weights = load_file(copied / SINGLE)
    weights["model.norm.weight"] = torch.zeros(48, dtype=torch.int8)
    save_file(weights, copied / SINGLE)
    with pytest.raises(ModelError, match=r"model\.norm\.weight .* is of type I8"):
        open_model(str(copied))


@pytest.fixture(scope="module")
def sharded_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    FAMILIES["qwen3"].build().save_pretrained(folder, max_shard_size="60KB")
    return folder


@pytest.fixture
def sharded(sharded_once: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharded_once, tmp_path / "model"))


def test_missing_shard(sharded: Path):
    shard = min(sharded.glob("*.safetensors"))
    shard.unlink()
    with pytest.raises(ModelError, match=rf"index\.json names '{shard.name}', which is not there"):
        open_model(str(sharded))


def test_damaged_index(sharded: Path):
    (sharded / INDEX).write_text("{")
    with pytest.raises(ModelError, match=r"index\.json is not JSON"):
        open_model(str(sharded))


def test_index_that_names_the_wrong_shard(sharded: Path):
    index = json.loads((sharded / INDEX).read_text())
    places = index["weight_map"]
    places["model.norm.weight"] = next(
        p for p in places.values() if p != places["model.norm.weight"]
    )
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"does not hold 'model\.norm\.weight'"):
        open_model(str(sharded))


@pytest.mark.parametrize("name", ["../outside/{}", "{folder}/outside/{}", "sub/../../outside/{}"])
def test_index_that_leaves_its_folder(sharded: Path, name: str):
    index = json.loads((sharded / INDEX).read_text())
    shard = index["weight_map"]["model.norm.weight"]
    outside = sharded.parent / "outside"
    outside.mkdir()
    (sharded / "sub").mkdir()
    shutil.move(sharded / shard, outside / shard)
    named = name.format(shard, folder=sharded.parent)
    assert (sharded / named).is_file()
    index["weight_map"]["model.norm.weight"] = named
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match="which is outside of its folder"):
        open_model(str(sharded))


def test_shards_may_be_links_and_lie_in_folders(sharded: Path):
    index = json.loads((sharded / INDEX).read_text())
    first, *_ = sorted(set(index["weight_map"].values()))
    (sharded / "parts").mkdir()
    shutil.move(sharded / first, sharded.parent / "blob")
    (sharded / "parts" / first).symlink_to(sharded.parent / "blob")
    places = index["weight_map"]
    index["weight_map"] = {
        key: f"parts/{first}" if place == first else place for key, place in places.items()
    }
    (sharded / INDEX).write_text(json.dumps(index))
    assert open_model(str(sharded)).weight("norm").read().size == 48


LINKED = (
    SINGLE, INDEX, "config.json", "generation_config.json", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
)  # fmt: skip


@pytest.mark.parametrize("name", LINKED)
def test_a_link_to_nothing_is_named(name: str, tmp_path: Path):
    """A cache of the Hub holds links, whose targets may be gone."""
    save_tokenizer(tmp_path)
    FAMILIES["qwen3"].build().save_pretrained(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to("../../blobs/3f2a")
    with pytest.raises(
        ModelError, match=rf"{re.escape(name)} is a link to \.\./\.\./blobs/3f2a, .*cp -rL"
    ):
        open_model(tmp_path).tokenizer()


def test_a_shard_and_a_model_that_link_to_nothing_are_named(sharded: Path):
    shard = min(sharded.glob("*.safetensors"))
    shard.unlink()
    shard.symlink_to("gone")
    with pytest.raises(ModelError, match=rf"{shard.name} is a link to gone, which is not there"):
        open_model(sharded)
    model = sharded / "model.gguf"
    model.symlink_to("gone.gguf")
    with pytest.raises(ModelError, match=r"model\.gguf is a link to gone\.gguf"):
        open_model(model)


def refuse(monkeypatch: pytest.MonkeyPatch, method: str, folder: Path, ending: str = "") -> None:
    """Lets a method of paths in the folder fail as the system does where nothing is allowed."""
    allowed = getattr(Path, method)

    def refused(path: Path, *args: Any, **options: Any) -> Any:
        if path.parent == folder and path.name.endswith(ending):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return allowed(path, *args, **options)

    monkeypatch.setattr(Path, method, refused)


def test_the_folder_of_someone_else_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    FAMILIES["qwen3"].build().save_pretrained(tmp_path)
    refuse(monkeypatch, "stat", tmp_path)
    with pytest.raises(ModelError, match=r"config\.json can't be looked at \(Permission denied\)"):
        open_model(tmp_path)


def test_weights_of_someone_else_are_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    FAMILIES["qwen3"].build().save_pretrained(tmp_path)
    refuse(monkeypatch, "open", tmp_path, SINGLE)
    with pytest.raises(ModelError, match=r"model\.safetensors can't be read \(Permission denied\)"):
        open_model(tmp_path)


@pytest.mark.parametrize("name", [SINGLE, "config.json", "generation_config.json"])
def test_a_pipe_is_no_file(copied: Path, name: str):
    (copied / name).unlink(missing_ok=True)
    os.mkfifo(copied / name)
    if name == "generation_config.json":
        assert open_model(str(copied)).config
        return
    with pytest.raises(ModelError, match=r"is not a file|has no config\.json"):
        open_model(str(copied))
    with pytest.raises(ModelError, match="is not a file"):
        read_json(copied / name)


def test_shards_without_index(sharded: Path):
    whole = open_model(str(sharded))
    (sharded / INDEX).unlink()
    again = open_model(str(sharded))
    assert set(again.readers) == set(whole.readers)
    first = min(sharded.glob("*.safetensors"))
    shutil.copyfile(first, sharded / "again.safetensors")
    with pytest.raises(ModelError, match="and in another file"):
        open_model(str(sharded))


def test_a_single_file_beside_shards_of_before_is_the_model(sharded: Path):
    """As transformers reads such a folder, which was saved again in another way."""
    weights = {
        name: x + 1 for path in sharded.glob("*.safetensors") for name, x in load_file(path).items()
    }
    save_file(weights, sharded / SINGLE)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(sharded)
    assert torch.equal(theirs.state_dict()["model.norm.weight"], weights["model.norm.weight"])
    assert_same(open_model(sharded), theirs)


def test_no_weights(copied: Path):
    (copied / SINGLE).unlink()
    with pytest.raises(ModelError, match=r"has no \*\.safetensors file; .* for random weights"):
        open_model(str(copied))
    (copied / "pytorch_model.bin").touch()
    with pytest.raises(
        ModelError,
        match=r"file, and pytorch_model\.bin is not read, .* write it by save_pretrained",
    ):
        open_model(str(copied))
    assert open_model(str(copied / "config.json")).random
