"""open_model: a name or path in; configuration, weight readers and tokenizer out.

Weights are read lazily, slice by slice, under the names and shapes of models/decoder.py (the table
is in models/weights/tensors.py), so each rank reads its own part. Next on the walk:
models/decoder.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from distmega.arguments import MAX_NUMBER, require_whole
from distmega.errors import ModelError
from distmega.models.config import ModelConfig
from distmega.models.decoder import AnyDecoder
from distmega.models.text.tokenizer import Tokenizer, byte_tokenizer
from distmega.models.weights.random_source import RandomReader
from distmega.models.weights.tensors import RopeTableReader, WeightReader, weight_specs
from distmega.sources import late
from distmega.sources.locate import Location, config_at, locate_model


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """An open model. `random`: its weights are made up, and it answers nonsense."""

    name: str
    config: AnyDecoder
    readers: Mapping[str, WeightReader]
    make_tokenizer: Callable[[], Tokenizer]
    random: bool = False

    def weight(self, name: str) -> WeightReader:
        """The reader of one weight of the decoder program, rope_table included."""
        if name not in self.readers:
            found = f"model {self.name!r} has no weight {name!r}"
            remedy = "build the program from this model's configuration"
            raise ModelError(found, expected="a weight of its decoder", remedy=remedy)
        return self.readers[name]

    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; each call builds it anew."""
        return self.make_tokenizer()


def open_model(name: str | PathLike[str], *, seed: int = 0) -> ModelSource:
    """Opens what locate_model finds; `seed` is for weights of presets and of a config.json alone.

    Every weight is checked for presence, shape and completeness; ModelError says what is wrong.
    RequestError for a seed that is no whole number from 0 on.
    """
    require_whole("seed", seed, 0, MAX_NUMBER)
    return _open_at(locate_model(name, "weights"), seed=seed)


def _open_at(location: Location, config: AnyDecoder | None = None, *, seed: int = 0) -> ModelSource:
    """Opens the files at a location; see open_model. config: where it is read already."""
    if location.kind == "gguf":
        return _open_gguf(location)
    config = config or config_at(location)
    if not isinstance(config, ModelConfig):
        return _open_other(location, config)
    if location.kind == "folder":
        readers = late.read_safetensors(location.path, config)
        return _source(location, config, readers, _folder_tokenizer(location.path, config))
    random = {
        spec.name: RandomReader(spec=spec, seed=seed) for spec in weight_specs(config).values()
    }
    beside = location.path.parent if location.kind == "config" else None
    if beside and (beside / late.TOKENIZER_FILE).is_file():
        return _source(location, config, random, _folder_tokenizer(beside, config))
    return _source(location, config, random, lambda: byte_tokenizer(config.vocab))


def tokenizer_at(location: Location, config: AnyDecoder) -> Tokenizer:
    """The tokenizer of a model. Opens its other files too, so that what is wrong with them is known
    before its program is made and ranks start, but where they are still to be fetched. ModelError
    as of open_model and of the tokenizer.
    """
    if location.of_hub:
        return late.tokenizer_from_folder(location.path, config.eos_ids)
    return _open_at(location, config).tokenizer()


def _open_other(location: Location, config: AnyDecoder) -> ModelSource:
    """A folder whose decoder others build."""
    if location.kind != "folder":
        raise ModelError(
            f"{location.name} alone, without weights",
            expected="a folder with weights beside config.json, for a model read by transformers",
            remedy="give the folder",
        )
    assert isinstance(config, late.HfDecoder), config
    return ModelSource(
        name=location.name,
        config=config,
        readers=late.read_weights(location.path, config),
        make_tokenizer=lambda: late.tokenizer_from_folder(location.path, config.eos_ids),
    )


def _open_gguf(location: Location) -> ModelSource:
    file = late.open_gguf(location.path)
    config = late.config_from_gguf(file)
    readers = late.read_gguf(file, config)
    return _source(
        location, config, readers, lambda: late.tokenizer_from_gguf(file.metadata, config.eos_ids)
    )


def _folder_tokenizer(folder: Path, config: ModelConfig) -> Callable[[], Tokenizer]:
    return lambda: late.tokenizer_from_folder(folder, config.eos_ids)


def _source(
    location: Location,
    config: ModelConfig,
    readers: Mapping[str, WeightReader],
    make_tokenizer: Callable[[], Tokenizer],
) -> ModelSource:
    return ModelSource(
        name=location.name,
        config=config,
        readers={**readers, "rope_table": RopeTableReader(config=config)},
        make_tokenizer=make_tokenizer,
        random=location.random,
    )
