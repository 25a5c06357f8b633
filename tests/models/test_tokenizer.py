"""Tokenizers: of GGUF metadata against transformers and sentencepiece, of folders, streaming and
chat prompts.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import transformers
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers.convert_slow_tokenizer import TikTokenConverter

from distmega.errors import ModelError, RequestError
from distmega.models.fields import Fields, read_json
from distmega.models.gguf.file import open_gguf
from distmega.models.gguf.tokenizer import tokenizer_from_gguf
from distmega.models.huggingface.tokenizer import tokenizer_from_folder
from distmega.models.text.tokenizer import Tokenizer, byte_tokenizer
from distmega.sources.load import ModelSource, open_model
from distmega.sources.locate import locate_model
from tests.models.files import FAMILIES

DATA = Path(__file__).parents[1] / "data"
G = "tokenizer.ggml."

TEXTS = [
    "",
    "Hello world",
    "The capital of France is",
    "a  b   c\n\n d\t\te\r\n\r\nf",
    "  leading and trailing  ",
    "1234567 3.14159 x86_64 2026-11-21",
    "I'm sure they'll say WE'RE don't",
    "def f(x):\n    return x**2  # square\n",
    "naïve café déjà über straße",
    "日本語のテキスト 中文 한국어 العربية हिन्दी",
    "🙂👨\u200d👩\u200d👧🏳️\u200d🌈",
    "e\u0301 combining, \u00a0 non-breaking, \ufeff mark, \u2003 em space",
    "\x00\x01 control \x7f",
    "half \ufffd character",
]


@pytest.fixture(scope="module")
def smol(smollm2: ModelSource) -> Tokenizer:
    return smollm2.tokenizer()


@pytest.fixture(scope="module")
def metadata() -> Fields:
    return open_gguf(locate_model("smollm2").path).metadata


def changed(metadata: Fields, **changes: object) -> Tokenizer:
    values = dict(metadata.data) | {f"{G}{key}": value for key, value in changes.items()}
    return tokenizer_from_gguf(Fields(values, "m.gguf"), ())


@pytest.mark.parametrize("text", [*TEXTS, (DATA / "paragraph.txt").read_text()])
def test_round_trip(smol: Tokenizer, text: str):
    ids = smol.encode(text)
    assert smol.decode(ids) == text
    stream = smol.stream()
    assert "".join(stream.push(token) for token in ids) + stream.finish() == text


def test_known_ids(smol: Tokenizer):
    assert smol.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert smol.encode("<|im_start|>user") == [1, 4093]
    assert smol.decode([1, 4093]) == "user"
    assert smol.decode([1, 4093], skip_special_tokens=False) == "<|im_start|>user"
    assert (smol.eos_ids, smol.vocab) == ((2,), 49152)


def test_smollm2_equals_transformers(smol: Tokenizer):
    path = locate_model("smollm2").path
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in [*TEXTS, (DATA / "paragraph.txt").read_text(), "<|im_start|>user\nhi<|im_end|>\n"]:
        assert smol.encode(text) == theirs(text)["input_ids"], text


def test_digits_are_split_as_in_the_published_tokenizer(metadata: Fields, smol: Tokenizer):
    """Digits of any script stand alone; transformers drops this when it reads GGUF."""
    backend = Backend(models.BPE(vocab=_vocab(metadata), merges=_merges(metadata)))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    for text in ["½ ² Ⅷ", "٣٤٥", "1234", *TEXTS]:
        assert smol.encode(text) == backend.encode(text).ids


def test_qwen2_equals_transformers(metadata: Fields):
    theirs = transformers.Qwen2Tokenizer(_vocab(metadata), _merges(metadata))
    ours = changed(metadata, pre="qwen2")
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"], text


def test_llama3_equals_the_published_split(metadata: Fields):
    model = models.BPE(vocab=_vocab(metadata), merges=_merges(metadata), ignore_merges=True)
    backend = Backend(model)
    split = pre_tokenizers.Split(Regex(TikTokenConverter().pattern), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    ours = changed(metadata, pre="llama-bpe")
    for text in TEXTS:
        assert ours.encode(text, add_special_tokens=False) == backend.encode(text).ids, text


def _vocab(metadata: Fields) -> dict[str, int]:
    return {token: n for n, token in enumerate(metadata.sequence(f"{G}tokens", str))}


def _merges(metadata: Fields) -> list[tuple[str, str]]:
    return [tuple(merge.split(" ")) for merge in metadata.sequence(f"{G}merges", str)]


def test_begin_token(metadata: Fields):
    assert changed(metadata, add_bos_token=True).encode("Hi")[0] == 1
    ours = changed(metadata, pre="llama-bpe", add_bos_token=None)
    assert ours.encode("Hi")[0] == 1
    assert 1 not in ours.encode("Hi", add_special_tokens=False)


@pytest.mark.parametrize("token", ["<a b>", ":0", "$A", "a:b:c", " "])
def test_a_begin_token_may_be_any_text(metadata: Fields, token: str):
    tokens = list(metadata.sequence(f"{G}tokens", str))
    tokens[1] = token
    ours = changed(metadata, tokens=tokens, add_bos_token=True)
    assert ours.encode("Hi")[0] == 1
    assert 1 not in ours.encode("Hi", add_special_tokens=False)


@pytest.fixture(scope="module")
def sentencepiece() -> Fields:
    return read_json(DATA / "sentencepiece.json")


def from_sentencepiece(fields: Fields, **changes: object) -> Tokenizer:
    values = {
        "model": "llama", "tokens": fields.data["tokens"], "scores": fields.data["scores"],
        "token_type": fields.data["types"], "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    given = {f"{G}{key}": value for key, value in (values | changes).items()}
    return tokenizer_from_gguf(Fields(given, "m.gguf"), (2,))


def test_sentencepiece_ids(sentencepiece: Fields):
    ours = from_sentencepiece(sentencepiece)
    for text, ids in sentencepiece.sequence("cases", list):
        assert ours.encode(text, add_special_tokens=False) == ids, text
        assert ours.encode(text) == [1, *ids]
        assert ours.decode(ids) == text
        stream = ours.stream()
        assert "".join(stream.push(token) for token in ids) + stream.finish() == text


def test_sentencepiece_answer_keeps_its_leading_space(sentencepiece: Fields):
    ours = from_sentencepiece(sentencepiece)
    prompt, whole = ours.encode("subject to"), ours.encode("subject to the terms")
    assert whole[: len(prompt)] == prompt
    stream = ours.stream(prompt)
    assert "".join(stream.push(token) for token in whole[len(prompt) :]) == " the terms"


def test_stream_never_cuts_a_character(smol: Tokenizer):
    stream = smol.stream()
    parts = [stream.push(token) for token in smol.encode("日本 🙂 é")]
    assert "".join(parts) == "日本 🙂 é"
    assert "" in parts
    assert all("\ufffd" not in part for part in parts)


def test_stream_of_broken_bytes_equals_decode(smol: Tokenizer):
    rng = random.Random(0)
    for _ in range(50):
        ids = [rng.choice([rng.randrange(49152), rng.randrange(100, 270)]) for _ in range(30)]
        stream = smol.stream()
        assert "".join(stream.push(token) for token in ids) + stream.finish() == smol.decode(ids)


@pytest.mark.parametrize("text", ["\ufffd", "\u00e9\ufffd", "\U0001f642"])
def test_what_never_ends_in_a_character_is_given_out_in_linear_time(text: str, smol: Tokenizer):
    """Broken bytes, a token that is U+FFFD, and tokens of the end of one character and the
    beginning of the next.
    """
    decoded = []

    class Counting(Tokenizer):
        def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
            decoded.append(len(ids))
            return super().decode(ids, skip_special_tokens=skip_special_tokens)

    for tokenizer in (smol, byte_tokenizer(256)):
        single = [token for token in range(256) if tokenizer.decode([token]) == "\ufffd"]
        special = [0] * (900 if tokenizer is smol else 0)
        for ids in (
            tokenizer.encode(text * 400),
            single[:1] * 900,
            [*single, *single[::-1]] * 4,
            [*tokenizer.encode("a "), *special, *tokenizer.encode(" b")],
        ):
            decoded.clear()
            stream = Counting(tokenizer._backend).stream()
            pieces = [stream.push(token) for token in ids]
            end = stream.finish()
            assert "".join(pieces) + end == tokenizer.decode(ids)
            assert len(end) <= 34
            assert sum(decoded) < 60 * len(ids)


def test_unfinished_character_at_the_end(smol: Tokenizer):
    stream = smol.stream()
    ids = smol.encode("日")[:-1]
    assert "".join(stream.push(token) for token in ids) == ""
    assert "\ufffd" in stream.finish()
    assert stream.finish() == ""


def test_chat_prompt(smol: Tokenizer):
    text = smol.chat_prompt([{"role": "user", "content": "hi"}])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    system = [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}]
    expected = (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert smol.chat_prompt(system) == expected


def test_chat_templates_that_refuse():
    with pytest.raises(RequestError, match="no chat template"):
        byte_tokenizer(256).chat_prompt([])
    refusing = Tokenizer(Backend(models.BPE()), chat_template="{{ raise_exception('no system') }}")
    with pytest.raises(RequestError, match="no system"):
        refusing.chat_prompt([])
    for template in (
        "{% for %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0].x.y }}",
        "{{ 1 / 0 }}",
    ):
        with pytest.raises(RequestError, match="chat template"):
            Tokenizer(Backend(models.BPE()), chat_template=template).chat_prompt([])


def test_lone_surrogate(smol: Tokenizer):
    with pytest.raises(RequestError, match="valid Unicode"):
        smol.encode("a\udcff")


@pytest.fixture
def folder(tmp_path: Path, metadata: Fields) -> Path:
    FAMILIES["qwen2"].build().save_pretrained(tmp_path)
    theirs = transformers.Qwen2Tokenizer(_vocab(metadata), _merges(metadata))
    theirs.chat_template = "{{ eos_token }}{{ pad_token }}{{ messages[0].content }}"
    theirs.save_pretrained(tmp_path)
    return tmp_path


def test_folder(folder: Path, metadata: Fields):
    ours = open_model(str(folder)).tokenizer()
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"], text
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs(text)["input_ids"])
    assert ours.chat_prompt([{"role": "user", "content": "x"}]) == "<|endoftext|>" * 2 + "x"
    assert open_model(str(folder / "config.json")).tokenizer().encode("Hi") == ours.encode("Hi")


def test_named_chat_templates(folder: Path):
    (folder / "chat_template.jinja").unlink()
    named = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    settings = {"chat_template": named, "eos_token": {"content": "<|endoftext|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert open_model(str(folder)).tokenizer().chat_prompt([]) == "d"


OLD = {"bos_token": "<m>", "eos_token": {"content": "</m>", "special": True}}


@pytest.mark.parametrize(
    ("settings", "older"),
    [
        ({}, OLD),
        ({"bos_token": "<s>", "pad_token": "<p>"}, OLD),
        ({"bos_token": "<s>", "added_tokens_decoder": {}}, OLD),
        ({"bos_token": None, "image_token": "<i>", "add_bos_token": True}, {}),
        ({"extra_special_tokens": {"image_token": "<x>"}}, {}),
        ({"extra_special_tokens": ["<x>"], "model_specific_special_tokens": {"a_token": "A"}}, OLD),
    ],
)
def test_templates_find_the_special_tokens_that_transformers_gives_them(
    folder: Path, settings: dict[str, object], older: dict[str, object]
):
    (folder / "chat_template.jinja").unlink()
    names = ("bos_token", "eos_token", "pad_token", "image_token", "a_token", "add_bos_token")
    template = "|".join(f"{{{{ {name} }}}}" for name in names)
    kept = folder / "tokenizer_config.json"
    kept.write_text(json.dumps({**settings, "chat_template": template}))
    (folder / "special_tokens_map.json").write_text(json.dumps(older))
    messages = [{"role": "user", "content": "x"}]
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    expected = theirs.apply_chat_template(messages, tokenize=False)
    assert tokenizer_from_folder(folder, ()).chat_prompt(messages) == expected


@pytest.mark.parametrize("text", ["{", "{}", '{"model": {"type": "Unheard"}}', "[]"])
def test_damaged_tokenizer_file(folder: Path, text: str):
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        open_model(str(folder)).tokenizer()


def test_a_tokenizer_whose_library_panics(folder: Path):
    value = json.loads((folder / "tokenizer.json").read_text())
    part = {"SpecialToken": {"id": "none", "type_id": 0}}
    value["post_processor"] = {
        "type": "TemplateProcessing", "single": [part], "pair": [part], "special_tokens": {},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(value))
    with pytest.raises(ModelError, match=r"tokenizer\.json is damaged .*encodes and decodes text"):
        open_model(str(folder)).tokenizer()


def test_a_tokenizer_file_neither_cuts_nor_pads(folder: Path):
    before = open_model(str(folder)).tokenizer().encode("one two three")
    value = json.loads((folder / "tokenizer.json").read_text())
    value["truncation"] = {
        "direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(value))
    assert open_model(str(folder)).tokenizer().encode("one two three") == before


def test_a_template_in_another_encoding(folder: Path):
    (folder / "chat_template.jinja").write_bytes("{{ 'é' }}".encode("latin-1"))
    with pytest.raises(ModelError, match=r"chat_template\.jinja is not UTF-8"):
        open_model(str(folder)).tokenizer()


def test_folder_without_tokenizer(folder: Path):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        open_model(str(folder)).tokenizer()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "bert"}, "'bert'"),
        ({"pre": "tekken"}, "'tekken'"),
        ({"tokens": None}, "tokens"),
        ({"merges": ["no such"]}, "damaged"),
        ({"merges": "all"}, "merges"),
        ({"token_type": [1]}, "token_type"),
        ({"bos_token_id": 10**6}, "bos_token_id"),
        ({"bos_token_id": None, "add_bos_token": True}, "begin token"),
    ],
)
def test_metadata_that_does_not_fit(metadata: Fields, changes: dict[str, object], named: str):
    with pytest.raises(ModelError) as caught:
        changed(metadata, **changes)
    assert named in caught.value.found


@pytest.mark.parametrize(
    "changes", [{"scores": None}, {"scores": [0.5]}, {"unknown_token_id": 999}]
)
def test_sentencepiece_metadata_that_does_not_fit(
    sentencepiece: Fields, changes: dict[str, object]
):
    with pytest.raises(ModelError, match=next(iter(changes))):
        from_sentencepiece(sentencepiece, **changes)


def test_byte_tokenizer():
    ours = open_model("tiny-llama").tokenizer()
    for text in TEXTS:
        assert ours.encode(text) == list(text.encode())
        assert ours.decode(ours.encode(text)) == text
    assert ours.decode([72, 256, 287]) == "H<256><287>"
    with pytest.raises(ModelError, match="vocabulary of 200"):
        byte_tokenizer(200)
