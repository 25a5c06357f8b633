"""The decoder's program: names, shapes and structure for every family, and its printed form."""

import pytest

from distmega.errors import RequestError
from distmega.models.decoder import Logits, build_decoder
from distmega.models.presets import PRESETS
from distmega.models.sampling import GREEDY, Method
from distmega.models.weights.tensors import RopeTableReader, weight_specs
from distmega.program.text import parse_program, print_program
from tests.calls import num_calls

TINY = [name for name in PRESETS if name.startswith("tiny")]


@pytest.mark.parametrize("logits", ["none", "last", "all"])
@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("name", TINY)
def test_interface(name: str, num_tokens: int, logits: Logits):
    config = PRESETS[name]
    program = build_decoder(config, num_tokens, 32, logits=logits)
    tensors = program.tensor_map()
    inputs = {t.name: (t.shape, t.dtype) for t in program.with_role("input")}
    assert inputs == {"tokens": ((num_tokens,), "i64"), "positions": ((num_tokens,), "i64")}
    weights = {t.name: t.shape for t in program.with_role("weight")}
    expected = {spec.name: spec.shape for spec in weight_specs(config).values()}
    assert weights == expected | {"rope_table": (32, config.head_dim)}
    states = {t.name: t.shape for t in program.with_role("state")}
    shape = (config.num_kv_heads, 32, config.head_dim)
    assert states == {f"layers.{i}.{c}_cache": shape for i in range(2) for c in "kv"}
    assert program.outputs == (("next",) if logits == "none" else ("logits", "next"))
    rows = num_tokens if logits == "all" else 1
    assert tensors["logits"].shape == (rows, config.vocab)
    assert (tensors["next"].shape, tensors["next"].dtype) == ((1,), "i64")
    assert parse_program(print_program(program)) == program


@pytest.mark.parametrize("logits", ["none", "last", "all"])
def test_a_batch_has_a_cache_and_a_row_for_each_sequence(logits: Logits):
    program = build_decoder(PRESETS["tiny-qwen3"], 1, 32, batch=5, logits=logits)
    tensors = program.tensor_map()
    assert tensors["tokens"].shape == tensors["positions"].shape == tensors["next"].shape == (5,)
    assert tensors["logits"].shape == (5, PRESETS["tiny-qwen3"].vocab)
    one = build_decoder(PRESETS["tiny-qwen3"], 1, 32).with_role("state")
    assert [t.shape for t in program.with_role("state")] == [(5, *t.shape) for t in one]
    assert all(op.kind != "slice" for op in program.ops)
    assert parse_program(print_program(program)) == program


@pytest.mark.parametrize(("num_tokens", "batch"), [(2, 3), (1, 0)])
def test_a_batch_takes_one_token_of_each_sequence(num_tokens: int, batch: int):
    with pytest.raises(RequestError, match=rf"{num_tokens} tokens? of each of {batch} sequences?;"):
        build_decoder(PRESETS["tiny-llama"], num_tokens, 32, batch=batch)


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize(
    ("method", "kinds", "num_settings"),
    [
        (Method(kind="plain"), ["sample"], 2),
        (Method(kind="limited"), ["cutoff", "sample"], 3),
        (Method(kind="limited", num_candidates=8), ["top", "cutoff", "sample"], 3),
        (Method(kind="limited", num_candidates=1024), ["cutoff", "sample"], 3),
    ],
)
def test_methods_of_choice(num_tokens: int, method: Method, kinds: list[str], num_settings: int):
    """Candidates are looked for only where the vocabulary has more."""
    program = build_decoder(PRESETS["tiny-llama"], num_tokens, 32, method=method)
    inputs = {t.name: (t.shape, t.dtype) for t in program.with_role("input")}
    assert inputs["sampling"] == ((1, num_settings), "f32")
    assert inputs["seeds"] == ((1,), "i64")
    assert [op.kind for op in program.ops][-len(kinds) :] == kinds
    assert "argmax" not in {op.kind for op in program.ops}
    assert parse_program(print_program(program)) == program


def test_only_the_last_row_reaches_the_head():
    program = build_decoder(PRESETS["tiny-llama"], 7, 32, logits="last")
    ops = {op.name: op for op in program.ops}
    assert ops["last_hidden"].kind == "slice"
    assert ops["last_hidden"].reads[0].dims[0].offset == 6
    assert program.tensor_map()["normed"].shape == (1, 48)
    assert all(op.kind != "slice" for op in build_decoder(PRESETS["tiny-llama"], 1, 32).ops)


@pytest.mark.parametrize("method", [GREEDY, Method(kind="plain")])
def test_a_prompt_says_which_row_is_its_last(method: Method):
    program = build_decoder(PRESETS["tiny-qwen3"], 7, 32, method=method, prompt=True)
    ops = {op.name: op for op in program.ops}
    assert ops["last_hidden"].kind == "embedding"
    assert [read.tensor for read in ops["last_hidden"].reads] == ["last", "layers.1.ffn_sum"]
    assert program.tensor_map()["normed"].shape == (1, 48)
    attentions = [op for op in program.ops if op.kind == "attention"]
    assert {op.get("packed", 0) for op in attentions} == {7}
    if method.samples:
        assert ops["next"].reads[3].tensor == "last_positions"


def test_families_differ_where_they_should():
    programs = {name: build_decoder(PRESETS[name], 2, 32) for name in TINY}
    ops = {name: {op.name: op for op in program.ops} for name, program in programs.items()}
    assert ops["tiny-mistral"]["layers.1.attention"].attr("window") == 8
    assert ops["tiny-llama"]["layers.1.attention"].attr("window") == 0
    assert len(ops["tiny-qwen2"]["layers.0.q"].reads) == 3
    assert ops["tiny-qwen3"]["layers.0.k_normed"].reads[-1].tensor == "layers.0.k_norm"
    assert ops["tiny-qwen2"]["logits"].reads[1].tensor == "embed"
    assert ops["tiny-llama"]["logits"].reads[1].tensor == "head"
    assert ops["tiny-llama"]["layers.0.attention"].attr("scale") == 16**-0.5


def test_dtype_of_weights_and_caches():
    program = build_decoder(PRESETS["tiny-qwen3"], 1, 32, dtype="bf16")
    tensors = program.tensor_map()
    assert {tensors[name].dtype for name in ("embed", "layers.0.k_cache", "logits")} == {"bf16"}
    assert tensors["rope_table"].dtype == "f32"


def test_rope_table_of_a_shorter_context_is_part_of_the_readers():
    config = PRESETS["tiny-llama"]
    table = build_decoder(config, 1, 32).tensor_map()["rope_table"]
    assert RopeTableReader(config=config).read((slice(0, 32),)).shape == table.shape


def test_a_large_model_is_built_with_few_calls():
    """0.1 s of a core of 3 GHz."""
    program = build_decoder(PRESETS["llama-3-70b"], 1, 8192)
    assert len(program.with_role("state")) == 160
    calls = num_calls(lambda: build_decoder(PRESETS["llama-3-70b"], 1, 8192))
    assert calls < 10_000 * PRESETS["llama-3-70b"].num_layers


@pytest.mark.parametrize(("num_tokens", "max_context"), [(0, 8), (9, 8), (1, 513)])
def test_context_that_does_not_fit(num_tokens: int, max_context: int):
    with pytest.raises(RequestError, match=f"{num_tokens} tokens? in a context of {max_context}"):
        build_decoder(PRESETS["tiny-llama"], num_tokens, max_context)
