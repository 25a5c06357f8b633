"""Tokenizer from a Hugging Face folder: tokenizer.json, and the chat template beside it."""

from pathlib import Path

from tokenizers import Tokenizer as Backend

from distmega.errors import ModelError
from distmega.models.fields import Fields, parse_json, read_json, read_text, require_target
from distmega.models.text.tokenizer import Tokenizer

TOKENIZER_FILE = "tokenizer.json"
_SPECIAL = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_BY_NAME = ("extra_special_tokens", "model_specific_special_tokens")
"""Where further special tokens are, by names of the model's own; the first may be a list."""
_SPECIAL_MAP = "special_tokens_map.json"


def tokenizer_from_folder(folder: Path, eos_ids: tuple[int, ...]) -> Tokenizer:
    """Reads tokenizer.json, and where they exist tokenizer_config.json, chat_template.jinja and,
    of older folders, special_tokens_map.json.
    """
    path = folder / TOKENIZER_FILE
    require_target(path)
    if not path.is_file():
        found = f"{folder} has no {TOKENIZER_FILE}"
        remedy = "download it, or save the tokenizer with transformers"
        raise ModelError(found, expected=f"a {TOKENIZER_FILE} beside config.json", remedy=remedy)
    text = read_text(path)
    parse_json(text, path)
    try:
        backend = Backend.from_str(text)
        backend.no_padding()
        backend.no_truncation()
    except BaseException as error:  # the library raises bare Exceptions, or panics
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        found = f"{path} can't be read ({error})"
        remedy = "download it again"
        raise ModelError(
            found, expected="a file of the library tokenizers", remedy=remedy
        ) from error
    settings = _optional_json(folder / "tokenizer_config.json")
    return Tokenizer(
        backend,
        eos_ids=eos_ids,
        chat_template=_chat_template(folder, settings),
        special_tokens=_special_tokens(folder, settings),
    ).check(str(path))


def _optional_json(path: Path) -> Fields:
    require_target(path)
    return read_json(path) if path.is_file() else Fields({}, str(path))


def _special_tokens(folder: Path, settings: Fields) -> dict[str, str]:
    """The text of each token that templates know by a name, as transformers gives them: those of
    tokenizer_config.json, and of what an older folder has beside it.
    """
    sources = [settings]
    sources += [
        settings.mapping(key) for key in _BY_NAME if isinstance(settings.data.get(key), dict)
    ]
    if "added_tokens_decoder" not in settings:  # a newer folder says all in its settings
        sources.append(_optional_json(folder / _SPECIAL_MAP))
    return {
        key: token
        for source in sources
        for key, value in source.data.items()
        if key in _SPECIAL or (key.endswith("_token") and isinstance(value, str | dict))
        if (token := _special(source, key))
    }


def _special(settings: Fields, key: str) -> str:
    """A special token: its text, or an object with the text under "content"."""
    if isinstance(settings.data.get(key), dict):
        return settings.mapping(key).text("content", "")
    return settings.text(key, "")


def _chat_template(folder: Path, settings: Fields) -> str:
    """The template of its own file, or of the settings: one text, or a list of named ones."""
    path = folder / "chat_template.jinja"
    require_target(path)
    if path.exists():
        return read_text(path)
    if isinstance(settings.data.get("chat_template"), list):
        named = [Fields(item, settings.where) for item in settings.sequence("chat_template", dict)]
        return next((t.text("template") for t in named if t.text("name", "") == "default"), "")
    return settings.text("chat_template", "")
