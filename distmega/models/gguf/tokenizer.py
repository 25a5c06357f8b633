"""Tokenizer rebuilt from GGUF metadata: tokens, types, merges or scores come in; a Tokenizer goes
out.

`gpt2` files are byte-level BPE whose pre-tokenizer is given by name. `llama` files are
SentencePiece BPE: scores in place of merges, spaces written as U+2581, unknown characters spelled
as byte tokens.
"""

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from distmega.errors import ModelError, counted
from distmega.models.fields import Fields
from distmega.models.text.tokenizer import Tokenizer

_PREFIX = "tokenizer.ggml."
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_SPACE = "\u2581"

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The split of Llama 3 and Qwen 2, which differ in how many digits stay together."""

_SPLITS = {"llama-bpe": _SPLIT % "{1,3}", "qwen2": _SPLIT % ""}
_PRE_TOKENIZERS = ("gpt-2", "smollm", *_SPLITS)


def tokenizer_from_gguf(metadata: Fields, eos_ids: tuple[int, ...]) -> Tokenizer:
    """The tokenizer that a GGUF file carries; ModelError when it has none or one of an unknown
    kind.
    """
    model = metadata.text(f"{_PREFIX}model")
    tokens = metadata.sequence(f"{_PREFIX}tokens", str)
    kinds = metadata.sequence(f"{_PREFIX}token_type", int)
    if len(kinds) != len(tokens):
        raise metadata.bad(f"{_PREFIX}token_type", f"{counted(len(tokens), 'type')}, one a token")
    if model == "gpt2":
        backend = _byte_level_bpe(metadata, tokens)
        add_bos = metadata.text(f"{_PREFIX}pre", "") == "llama-bpe"
    elif model == "llama":
        backend = _sentencepiece_bpe(metadata, tokens, kinds)
        add_bos = True
    else:
        raise metadata.bad(f"{_PREFIX}model", "gpt2 or llama")
    _add_special_tokens(backend, tokens, kinds)
    special = _special_tokens(metadata, tokens)
    if metadata.flag(f"{_PREFIX}add_bos_token", add_bos):
        _put_first(backend, metadata, special)
    template = metadata.text("tokenizer.chat_template", "")
    tokenizer = Tokenizer(backend, eos_ids=eos_ids, chat_template=template, special_tokens=special)
    return tokenizer.check(metadata.where)


def _byte_level_bpe(metadata: Fields, tokens: list[str]) -> Backend:
    name = metadata.text(f"{_PREFIX}pre", "gpt-2")
    if name not in _PRE_TOKENIZERS:
        raise metadata.bad(f"{_PREFIX}pre", f"one of {', '.join(_PRE_TOKENIZERS)}")
    pairs = [merge.partition(" ") for merge in metadata.sequence(f"{_PREFIX}merges", str)]
    merges = [(left, right) for left, _, right in pairs]
    backend = Backend(_bpe(metadata, tokens, merges, ignore_merges=name == "llama-bpe"))
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=name not in _SPLITS)
    if name in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[name]), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, plain])
    elif name == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, plain])
    else:
        backend.pre_tokenizer = plain
    if name == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_bpe(metadata: Fields, tokens: list[str], kinds: list[int]) -> Backend:
    scores = metadata.sequence(f"{_PREFIX}scores", float)
    if len(scores) != len(tokens):
        raise metadata.bad(f"{_PREFIX}scores", f"{counted(len(tokens), 'score')}, one a token")
    unknown = metadata.integer(f"{_PREFIX}unknown_token_id", 0)
    if not 0 <= unknown < len(tokens):
        raise metadata.bad(f"{_PREFIX}unknown_token_id", f"an id below {len(tokens)}")
    merges = _merges_from_scores(tokens, kinds, scores)
    model = _bpe(
        metadata, tokens, merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True
    )
    backend = Backend(model)
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    text: list[decoders.Decoder] = [
        decoders.Replace(_SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if metadata.flag(f"{_PREFIX}add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend(_SPACE))
        text.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(text)
    return backend


def _merges_from_scores(
    tokens: list[str], kinds: list[int], scores: list[float]
) -> list[tuple[str, str]]:
    """All ways to form a token from two others, the best-scored token first: SentencePiece's order
    of merging.
    """
    ids = {
        token: n
        for n, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind == _NORMAL
    }
    merges = []
    for token, n in ids.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                merges.append((-scores[n], n, ids[left], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]


def _bpe(
    metadata: Fields, tokens: list[str], merges: list[tuple[str, str]], **settings: bool | str
) -> models.BPE:
    vocab = {token: n for n, token in enumerate(tokens)}
    try:
        return models.BPE(vocab=vocab, merges=merges, **settings)
    except Exception as error:  # the library raises bare Exceptions
        found = f"the tokenizer in {metadata.where} is damaged ({error})"
        remedy = "download the file again"
        raise ModelError(found, expected="merges that form its tokens", remedy=remedy) from error


def _add_special_tokens(backend: Backend, tokens: list[str], kinds: list[int]) -> None:
    """Control and user-defined tokens are found in the text as they stand; control tokens are left
    out of answers.
    """
    for token, kind in zip(tokens, kinds, strict=True):
        if kind == _CONTROL:
            backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            backend.add_tokens([AddedToken(token, special=False, normalized=False)])


def _special_tokens(metadata: Fields, tokens: list[str]) -> dict[str, str]:
    """Texts of the begin and end tokens, as chat templates call them."""
    special = {}
    for name, key in (
        ("bos_token", f"{_PREFIX}bos_token_id"),
        ("eos_token", f"{_PREFIX}eos_token_id"),
    ):
        if key in metadata:
            number = metadata.integer(key)
            if not 0 <= number < len(tokens):
                raise metadata.bad(key, f"an id below {len(tokens)}")
            special[name] = tokens[number]
    return special


def _put_first(backend: Backend, metadata: Fields, special: dict[str, str]) -> None:
    if "bos_token" not in special:
        found = f"{metadata.where} wants a begin token but names none"
        expected = f"{_PREFIX}bos_token_id"
        raise ModelError(found, expected=expected, remedy="download the file again")
    token = special["bos_token"]
    number = metadata.integer(f"{_PREFIX}bos_token_id")
    begin = {
        "id": "begin",
        "ids": [number],
        "tokens": [token],
    }  # a token may hold spaces and colons
    backend.post_processor = processors.TemplateProcessing(
        single="begin:0 $A:0", special_tokens=[begin]
    )
