"""Tokenizer: text to token ids and back, streaming, and chat prompts; a thin wrapper of the library
`tokenizers`.

huggingface/tokenizer.py reads one from tokenizer.json, gguf/tokenizer.py rebuilds one from GGUF
metadata, and byte_tokenizer here serves models of random weights.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from distmega.errors import ModelError, RequestError
from distmega.models.text import late
from distmega.models.text.chat_template import render_chat

_REPLACEMENT = "\ufffd"
_STREAM_CONTEXT = 16
_MAX_PENDING = 32
"""Tokens that are kept together while their text is empty or ends in U+FFFD each time; so many are
no parts of one character.
"""
_MAX_PARTS = 3
"""U+FFFD that what follows may make a character: its bytes but the last."""


class Tokenizer:
    """Encodes and decodes; special tokens written in the text, such as <|im_start|>, are
    recognised.

    eos_ids: tokens that end an answer. chat_template: jinja2 text, empty when the model has none.
    """

    def __init__(
        self,
        backend: "late.Backend",
        *,
        eos_ids: tuple[int, ...] = (),
        chat_template: str = "",
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self.eos_ids = eos_ids
        self.chat_template = chat_template
        self._backend = backend
        self._special_tokens = dict(special_tokens or {})

    @property
    def vocab(self) -> int:
        """Number of ids."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the begin token in front if the model wants one."""
        try:
            with _library("the model's files", (TypeError, UnicodeError)):
                return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except (TypeError, UnicodeError) as error:
            found = f"text {text[:40]!r} can't be encoded"
            raise RequestError(found, expected="valid Unicode", remedy="pass UTF-8 text") from error

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD."""
        with _library("the model's files", (OverflowError, TypeError)):
            return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def special_id(self, text: str) -> int | None:
        """The id of the special token that is written so, which `decode` leaves out by default;
        None for other texts.
        """
        number: int | None = self._backend.token_to_id(text)
        added = self._backend.get_added_tokens_decoder() if number is not None else {}
        return number if number in added and added[number].special else None

    def stream(self, context: Sequence[int] = ()) -> "TokenStream":
        """A decoder of one token at a time; context: the ids of the prompt, whose text is not
        repeated.
        """
        return TokenStream(self, context)

    def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text of a conversation of {"role", "content"} messages up to where the model answers.

        Encode it with add_special_tokens=False. RequestError when the model has no chat template,
        ChatTemplateError when that fails, refuses or takes too much (chat_template.py).
        """
        if not self.chat_template:
            found = "the model has no chat template"
            raise RequestError(
                found, expected="an instruction-tuned model", remedy="give a plain prompt"
            )
        return render_chat(self.chat_template, messages, self._special_tokens)

    def check(self, where: str) -> "Tokenizer":
        """Itself; ModelError for one that can't encode and decode some texts."""
        for text in _PROBES:
            for special in (False, True):
                with _library(where):
                    ids = self._backend.encode(text, add_special_tokens=special).ids
                    self._backend.decode(ids, skip_special_tokens=not special)
        return self


_PROBES = ("", "a", "Hello, world! 12\n\t<|x|> \u65e5\u672c \U0001f642 \u00e9")


@contextmanager
def _library(where: str, passed: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turns what the library raises, but for `passed`, into ModelErrors, and so panics of what it
    is written in.
    """
    try:
        yield
    except passed:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelError(
            f"the tokenizer in {where} is damaged ({str(error)[:200]})",
            expected="one that encodes and decodes text",
            remedy="download the file again",
        ) from error


class TokenStream:
    """Text of tokens as they come; a character whose bytes are spread over tokens appears with its
    last one.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._restart(list(context)[-_STREAM_CONTEXT:])

    def push(self, token: int) -> str:
        """The text that this token completes, often empty for a part of a character."""
        self._ids.append(token)
        text = self._pending()
        if text and not text.endswith(_REPLACEMENT):
            self._restart(self._ids[self._num_old :])
            return text
        if len(self._ids) - self._num_old < _MAX_PENDING:
            return ""
        if not text:  # special tokens: none of them adds to what follows
            del self._ids[self._num_old + _STREAM_CONTEXT :]
            return ""
        num_held = self._restart(self._ids[-_STREAM_CONTEXT:], _MAX_PARTS)
        return text[: len(text) - num_held]

    def finish(self) -> str:
        """What is left at the end: an unfinished character, as U+FFFD."""
        text = self._pending()
        self._restart(self._ids)
        return text

    def _pending(self) -> str:
        return self._tokenizer.decode(self._ids)[self._num_shown :]

    def _restart(self, ids: list[int], most: int = 0) -> int:
        """Goes on after these tokens, whose text is shown but for up to `most` U+FFFD at its end;
        how many these are.
        """
        text = self._tokenizer.decode(ids)
        num_held = min(most, len(text) - len(text.rstrip(_REPLACEMENT)))
        self._ids, self._num_old, self._num_shown = ids, len(ids), len(text) - num_held
        return num_held


def byte_tokenizer(vocab: int) -> Tokenizer:
    """For random weights: ids 0 to 255 are bytes, and a higher id n reads as <n>."""
    if vocab < 256:
        found = f"a vocabulary of {vocab} has no tokenizer"
        raise ModelError(found, expected="at least 256, one id a byte", remedy="enlarge vocab_size")
    tokens = [*byte_letters(), *(f"<{n}>" for n in range(256, vocab))]
    backend = late.Backend(
        late.models.BPE(vocab={token: n for n, token in enumerate(tokens)}, merges=[])
    )
    backend.pre_tokenizer = late.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = late.decoders.ByteLevel()
    return Tokenizer(backend)


def byte_letters() -> list[str]:
    """The printable letter that byte-level BPE writes for each byte: itself, or one past U+00FF."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]
