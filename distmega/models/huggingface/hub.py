"""Models of the Hugging Face Hub by their id: "org/name" in, a folder of the Hub's cache out.

What the cache holds is taken as it is, without a network. What it lacks is fetched by the package
huggingface-hub (extra `hub`), which also brings its own settings: HF_TOKEN, HF_ENDPOINT,
HF_HUB_OFFLINE. Nothing but configurations, tokenizers and safetensors is fetched. Used by
sources/locate.py.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from distmega.errors import ModelError
from distmega.models.fields import read_json

try:
    import huggingface_hub
except ImportError:  # the extra is not installed
    huggingface_hub = None  # type: ignore[assignment]

_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_CONFIG, _INDEX, _SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
_CONFIGURATIONS = (_CONFIG, "generation_config.json")
_TOKENIZER = "tokenizer.json"
_TEXTS = (
    _TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
)  # fmt: skip
_WEIGHTS = (_INDEX, _SINGLE, "model-*.safetensors")
Needs = Literal["config", "tokenizer", "weights"]
"""What is read of a model: its configuration, its tokenizer too, or all of it."""

_FILES: Mapping[Needs, tuple[str, ...]] = {
    "config": _CONFIGURATIONS,
    "tokenizer": (*_CONFIGURATIONS, *_TEXTS),
    "weights": (*_CONFIGURATIONS, *_TEXTS, *_WEIGHTS),
}
"""Files that the reader of a folder then looks at, as patterns."""


def is_hub_id(name: str) -> bool:
    """Whether `name` could be an id of the Hub: org/name, and not the name of a model's file."""
    return bool(_ID.fullmatch(name)) and not name.endswith((".gguf", ".json"))


def hub_folder(name: str, expected: str, needs: Needs) -> Path:
    """The folder of a model that holds what is needed of it.

    ModelError, with what was `expected` of a name, where the cache lacks some of it and it can't be
    fetched.
    """

    def missing(reason: str, remedy: str) -> ModelError:
        return ModelError(f"no such model: {name!r} ({reason})", expected=expected, remedy=remedy)

    folder = _cached(name)
    if folder and not _lacks(folder, needs):
        return folder
    if huggingface_hub is None:
        raise missing(
            _state(folder, needs) + ", and huggingface-hub is not installed",
            "run: pip install 'distmega[hub]', or give a folder that holds the model",
        )
    try:
        fetched = Path(huggingface_hub.snapshot_download(name, allow_patterns=[*_FILES[needs]]))
    except Exception as error:  # the library raises what its HTTP library raises
        reason = " ".join(str(error).split())[:200]
        raise missing(
            f"{_state(folder, needs)}, and can't be fetched: {reason}",
            "check the id, the network, and HF_TOKEN for a model that asks for consent",
        ) from error
    if lacks := _lacks(fetched, needs):
        raise missing(
            f"the Hub has no {lacks} for it, or can't be reached",
            "choose a model with safetensors and a tokenizer.json",
        )
    return fetched


def cache_folder() -> Path:
    """Where the Hub's packages keep models, by the variables that they read."""
    given = os.environ
    if cache := given.get("HF_HUB_CACHE") or given.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache).expanduser()
    if home := given.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    base = given.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "huggingface" / "hub"


def _cached(name: str) -> Path | None:
    """The cached snapshot of the branch main."""
    model = cache_folder() / f"models--{name.replace('/', '--')}"
    try:
        commit = (model / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    folder = model / "snapshots" / commit
    return folder if re.fullmatch(r"\w+", commit) and folder.is_dir() else None


def _lacks(folder: Path, needs: Needs) -> str:
    """A file that is missing; empty if none is."""
    needed = [_CONFIG] if needs == "config" else [_CONFIG, _TOKENIZER]
    if needs == "weights":
        if (folder / _INDEX).is_file() and not (folder / _SINGLE).is_file():
            index = read_json(folder / _INDEX).mapping("weight_map")
            needed += sorted({index.text(key) for key in index.data})
        else:
            needed.append(_SINGLE)
    return next((file for file in needed if not (folder / file).is_file()), "")


def _state(folder: Path | None, needs: Needs) -> str:
    where = f"the Hugging Face cache {cache_folder()}"
    if folder is None:
        return f"not in {where}"
    return f"{where} has it without {_lacks(folder, needs)}"
