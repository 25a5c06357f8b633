"""Tokenizer from a Hugging Face folder: tokenizer.json, and the chat template beside it."""

from pathlib import Path

from tokenizers import Tokenizer as Backend

from distmega.errors import ModelError
from distmega.models.fields import Fields, parse_json, read_json, read_text, require_target
from distmega.models.text.tokenizer import Tokenizer

TOKENIZER_FILE = "tokenizer.json"
_SPECIAL = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
"""Tokens that templates know by these names."""


def tokenizer_from_folder(folder: Path, eos_ids: tuple[int, ...]) -> Tokenizer:
    """Reads tokenizer.json, and tokenizer_config.json and chat_template.jinja where they exist."""
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
        special_tokens={key: token for key in _SPECIAL if (token := _special(settings, key))},
    ).check(str(path))


def _optional_json(path: Path) -> Fields:
    require_target(path)
    return read_json(path) if path.is_file() else Fields({}, str(path))


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
