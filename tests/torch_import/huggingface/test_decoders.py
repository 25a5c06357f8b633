"""Decoders of transformers, captured: logits of every position against the model itself."""

import random
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from threading import Event

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    DeepseekV32Config,
    PretrainedConfig,
    ViTConfig,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from distmega import CPU, DeviceMesh, plan_program, replicate, shard
from distmega.compiled import CompiledProgram
from distmega.errors import CaptureError, RequestError
from distmega.program.types import Program
from distmega.torch_import.huggingface.attention import (
    StepRows,
    capturing,
    proved_window,
    rows_cache,
    seen_rows,
)
from distmega.torch_import.huggingface.decoders import (
    HfDecoder,
    _without_filling,
    make_model,
    open_decoder,
)
from tests.hostir.threads import ThreadCommunicator, Wires
from tests.repo.source import ROOT
from tests.torch_import.families import FAMILIES, VOCAB
from tests.torch_import.more_families import MORE_FAMILIES
from tests.torch_import.recurrent_families import RECURRENT

CONTEXT, TOLERANCE = 24, 1e-4


def reference(config: PretrainedConfig) -> nn.Module:
    """The model as transformers makes it, with weights that tell its parts apart.

    Attention with a soft cap is "eager": older releases leave the cap out of torch's own.
    """
    torch.manual_seed(0)
    attention = "eager" if getattr(config, "attn_logit_softcapping", None) else None
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def weights_of(decoder: HfDecoder, model: nn.Module) -> dict[str, Tensor]:
    """What the programs that were built so far read."""
    stored = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    found = {name: stored[target].detach() for name, target in decoder.targets.items()}
    derived = {name: each.of(found[each.source]) for name, each in decoder.derived.items()}
    return {**found, **derived, **decoder.constants}


@dataclass
class Job:
    """A prompt's program and a decode step's on the ranks of a mesh, over the same caches."""

    prompt: Program
    decode: Program
    weights: Mapping[str, Tensor]
    num_ranks: int

    def __post_init__(self) -> None:
        mesh = DeviceMesh(tp=self.num_ranks)
        wires = Wires(mesh)
        comms = [ThreadCommunicator(mesh, rank, wires) for rank in range(self.num_ranks)]
        # As the engine has it: a prompt's program writes whole sequences.
        by_heads = {
            state.name: shard(1, "tp") if state.shape[1] >= self.num_ranks else replicate()
            for state in self.decode.with_role("state")
            if len(state.shape) == 4
        }
        self.plan = plan_program(self.decode, mesh, CPU, by_heads)
        shared = {tensor.name for tensor in self.prompt.tensors}
        layouts = self.plan.persistent_layouts()
        plan = plan_program(self.prompt, mesh, CPU, {n: layouts[n] for n in layouts if n in shared})
        self.steps = {
            "prompt": [CompiledProgram(plan, comm) for comm in comms],
            "decode": [CompiledProgram(self.plan, comm) for comm in comms],
        }
        zeros = {state.name: torch.zeros(state.shape) for state in self.decode.with_role("state")}
        self.states = [step.parts(zeros) for step in self.steps["decode"]]

    def run(self, which: str, **rows: Sequence[int]) -> dict[str, Tensor]:
        """Outputs, which all ranks agree on."""

        def on_rank(rank: int) -> dict[str, Tensor]:
            step = self.steps[which][rank]
            names = [x.name for x in step.plan.program.with_role("weight")]
            given = {
                x.name: torch.tensor(rows[x.name]) for x in step.plan.program.with_role("input")
            }
            held = {name: self.weights[name] for name in names}
            return step({**self.states[rank], **step.parts({**held, **given})})

        with ThreadPoolExecutor(self.num_ranks) as pool:
            found = list(pool.map(on_rank, range(self.num_ranks)))
        assert all(torch.equal(each["next"], found[0]["next"]) for each in found)
        return found[0]


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def check_one_sequence(config: PretrainedConfig) -> HfDecoder:
    """Prefill and teacher-forced decode of one sequence, on one rank and on two."""
    model, decoder = reference(config), open_decoder(config)
    num_prompt, num_decoded = 7, 4
    ids = torch.randint(3, VOCAB, (num_prompt + num_decoded,)).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    prompt = decoder.build(num_prompt, CONTEXT, logits="all", prompt=True)
    decode = decoder.build(1, CONTEXT, logits="last")
    for ranks in (1, 2):
        job = Job(prompt, decode, weights_of(decoder, model), ranks)
        out = job.run(
            "prompt", tokens=ids[:num_prompt], positions=range(num_prompt),
            sequences=[0] * num_prompt, starts=[0, num_prompt], last=[num_prompt - 1],
        )  # fmt: skip
        assert relative_error(out["logits"], expected[:num_prompt]) < TOLERANCE
        assert int(out["next"]) == int(expected[num_prompt - 1].argmax())
        for position in range(num_prompt, len(ids)):
            out = job.run("decode", tokens=[ids[position]], positions=[position])
            assert relative_error(out["logits"], expected[position : position + 1]) < TOLERANCE
            assert int(out["next"]) == int(expected[position].argmax())
    return decoder


def family_config(name: str, seed: int = 0) -> PretrainedConfig:
    every = {**FAMILIES, **MORE_FAMILIES, **RECURRENT}
    return every[name](random.Random(zlib.crc32(name.encode()) + seed))


KINDS = ("gpt2", "gemma2", "phi3", "falcon-alibi", "mpt", "llama")
"""A family of each kind: learned positions; windows, soft caps and post-norms; q, k and v in one
matrix; a mask of its own; products and softmax; rotations with biases. The long sweep has all.
"""


@pytest.mark.parametrize("name", KINDS)
def test_a_family_gives_the_logits_of_transformers(name: str):
    decoder = check_one_sequence(family_config(name))
    assert not decoder.opaque


def test_the_page_of_models_names_every_family_that_is_compared():
    named = {*re.findall(r"[\w-]+", (ROOT / "docs/models.md").read_text())}
    families = {*FAMILIES, *MORE_FAMILIES, *RECURRENT}
    assert {re.sub(r"^falcon-.*", "falcon", name) for name in families} <= named


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_with_several_configurations(name: str, seed: int):
    assert not check_one_sequence(family_config(name, seed)).opaque


@pytest.mark.nightly
@pytest.mark.parametrize("name", MORE_FAMILIES)
def test_families_that_the_capture_was_not_written_with(name: str):
    assert not check_one_sequence(family_config(name)).opaque


@pytest.mark.nightly  # test_folders.py runs one of them
@pytest.mark.parametrize("name", RECURRENT)
def test_states_that_each_token_changes(name: str):
    decoder = check_one_sequence(family_config(name))
    assert not decoder.opaque
    assert decoder.recurrent_states


@pytest.mark.parametrize(
    "name",
    [
        "bloom",
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in ("gemma2", "gptj", "falcon-alibi", "gpt_neo", "gpt_oss", "mpt")
        ),
    ],
)
def test_several_sequences_in_one_program(name: str):
    """Prompts packed behind each other, then a token of each at positions of its own."""
    config = family_config(name)
    model, decoder = reference(config), open_decoder(config)
    lengths, num_decoded = (5, 2, 6), 3
    texts = [torch.randint(3, VOCAB, (n + num_decoded,)).tolist() for n in lengths]
    with torch.no_grad():
        expected = [model(torch.tensor([ids])).logits[0] for ids in texts]
    prompt = decoder.build(sum(lengths), CONTEXT, batch=3, logits="all", prompt=True)
    decode = decoder.build(1, CONTEXT, batch=3, logits="last")
    job = Job(prompt, decode, weights_of(decoder, model), 2)
    starts = [0, 5, 7, 13]
    out = job.run(
        "prompt",
        tokens=[token for ids, n in zip(texts, lengths, strict=True) for token in ids[:n]],
        positions=[place for n in lengths for place in range(n)],
        sequences=[which for which, n in enumerate(lengths) for _ in range(n)],
        starts=starts, last=[stop - 1 for stop in starts[1:]],
    )  # fmt: skip
    wanted = torch.cat([rows[:n] for rows, n in zip(expected, lengths, strict=True)])
    assert relative_error(out["logits"], wanted) < TOLERANCE
    for step in range(num_decoded):
        places = [n + step for n in lengths]
        tokens = [ids[place] for ids, place in zip(texts, places, strict=True)]
        out = job.run("decode", tokens=tokens, positions=places)
        wanted = torch.stack([rows[at] for rows, at in zip(expected, places, strict=True)])
        assert relative_error(out["logits"], wanted) < TOLERANCE


@pytest.mark.parametrize(
    "name",
    ["bloom", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("gpt2", "mamba"))],
)
def test_last_rows_of_as_many_rows_as_there_are_sequences(name: str):
    """A prompt of two tokens in a batch of two, of which only one is started."""
    config = family_config(name)
    model, decoder = reference(config), open_decoder(config)
    ids = torch.randint(3, VOCAB, (2,)).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    prompt = decoder.build(2, CONTEXT, batch=2, logits="last", prompt=True)
    decode = decoder.build(1, CONTEXT, batch=2, logits="last")
    out = Job(prompt, decode, weights_of(decoder, model), 1).run(
        "prompt", tokens=ids, positions=[0, 1], sequences=[0, 0], starts=[0, 2, 2], last=[1, 0]
    )
    assert relative_error(out["logits"], expected[[1, 0]]) < TOLERANCE
    assert int(out["next"][0]) == int(expected[1].argmax())


def test_attention_over_caches_is_the_op_that_kernels_know():
    decoder = open_decoder(family_config("gemma2"))
    program = decoder.build(1, CONTEXT)
    found = [op for op in program.ops if op.kind == "attention"]
    window = decoder.config.sliding_window
    assert [op.attr("window") for op in found] == [window, 0, window]
    assert {op.attr("softcap") for op in found} == {decoder.config.attn_logit_softcapping}
    assert {op.reads[1].tensor for op in found} == {f"layers.{n}.k_cache" for n in range(3)}
    assert not [op for op in program.ops if op.kind in ("attend", "set", "softmax", "gather")]


def test_biases_of_scores_are_a_table():
    """Of heads and positions, of attention that a class wrote out."""
    decoder = open_decoder(family_config("mpt"))
    program = decoder.build(1, CONTEXT)
    found = [op for op in program.ops if op.kind == "biased_attention"]
    assert len(found) == decoder.num_layers
    assert not [op for op in program.ops if op.kind == "softmax"]
    (name,) = {op.reads[4].tensor for op in found}
    table = decoder.constants[name][:, :, 0]
    steps = table[1:] - table[:-1]
    torch.testing.assert_close(steps, steps[:1].expand_as(steps))
    assert (steps[0] > 0).all()


def test_positions_counted_from_the_length_of_a_cache_are_those_of_the_rows():
    rows = StepRows(positions=torch.tensor([5, 6]), max_context=16)
    with capturing(rows):
        cache = rows_cache(rows, 1, lambda number, x: x)
        numbers, num_cached = torch.arange(2), cache.get_seq_length()
        assert torch.equal(torch.arange(num_cached, num_cached + 2), rows.positions)
        assert torch.equal(numbers + num_cached, rows.positions)
        assert torch.equal(num_cached + numbers, rows.positions)
        with pytest.raises(CaptureError, match="the number of cached positions is added"):
            torch.zeros(2, dtype=torch.long) + num_cached


def test_a_mask_of_an_encoder_that_is_not_there_is_no_fault():
    """Bart makes one for its encoder in any case."""
    assert open_decoder(family_config("bart")).covered


def test_a_decoder_that_keeps_other_states_says_so():
    config = DeepseekV32Config(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=8, n_routed_experts=2, num_experts_per_tok=1,
        moe_intermediate_size=16, first_k_dense_replace=1, n_group=1, topk_group=1,
        index_n_heads=2, index_head_dim=16, index_topk=8,
    )  # fmt: skip
    with pytest.raises(CaptureError, match="deepseek_v32: its layers keep more than keys and"):
        open_decoder(config)


def test_masks_by_which_rows_see_the_same_are_one():
    rows = StepRows(positions=torch.tensor([5]), max_context=16)
    functions = [lambda b, h, q, k, w=w: (k <= q) & (k > q - w) for w in (16, 4, 40, 4)]
    with capturing(rows):
        masks = [seen_rows(mask_function=function) for function in functions]
    assert masks[0] is not masks[1]
    assert [mask is masks[i % 2] for i, mask in enumerate(masks)] == [True] * 4
    assert [window for _, window in rows.causal] == [0, 4]


@pytest.mark.nightly
def test_layers_with_a_window_beyond_the_context_do_as_those_without():
    config = family_config("gemma2")
    config.num_hidden_layers, config.layer_types = 2, ["sliding_attention", "full_attention"]
    config.sliding_window = 2 * CONTEXT
    program = open_decoder(config).build(1, CONTEXT)
    found = [op.attr("window") for op in program.ops if op.kind == "attention"]
    assert found == [0, 0]


def test_a_mask_is_causal_only_if_it_is_for_every_pair():
    assert proved_window(lambda b, h, q, k: k <= q, 40) == 0
    assert proved_window(lambda b, h, q, k: (k <= q) & (k > q - 7), 40) == 7
    assert proved_window(lambda b, h, q, k: (k <= q) & (k != 3), 40) is None
    assert proved_window(lambda b, h, q, k: (k <= q) & (q // 8 == k // 8), 40) is None
    assert proved_window(lambda b, h, q, k: k < q + 2, 40) is None


def one_row() -> StepRows:
    return StepRows(positions=torch.zeros(1, dtype=torch.long), max_context=4)


def functions_of_libraries() -> list[object]:
    """Those that captures and models being made put others in the place of."""
    registries = (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)
    found = [
        registry[name] for registry in registries for name in ("sdpa", "eager") if name in registry
    ]
    return [*found, *(f for name, f in vars(nn.init).items() if name.startswith("_no_grad_"))]


@pytest.mark.parametrize(
    "enter", [lambda: capturing(one_row()), _without_filling], ids=["captures", "models"]
)
def test_threads_leave_torch_and_transformers_as_they_were(
    enter: Callable[[], AbstractContextManager[None]],
):
    """Whichever of two that open folders at once is the first to end."""
    before, entered, go = functions_of_libraries(), Event(), Event()

    def second() -> None:
        with enter():
            entered.set()
            assert go.wait(20)

    with ThreadPoolExecutor(1) as pool:
        with enter():
            done = pool.submit(second)
            entered.wait(0.3)
        go.set()
        done.result()
    assert functions_of_libraries() == before


def test_other_threads_run_and_make_models_during_a_capture():
    model, ids = reference(family_config("llama")), torch.tensor([[3, 4, 5]])

    def elsewhere() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return model(ids).logits, nn.init.normal_(torch.zeros(4))

    expected, _ = elsewhere()
    with ThreadPoolExecutor(1) as pool, capturing(one_row()), _without_filling():
        logits, drawn = pool.submit(elsewhere).result()
    assert torch.equal(logits, expected)
    assert drawn.any()


def test_parameters_are_never_filled():
    """Which would take their memory, and most of the time of a capture."""
    before = torch.random.get_rng_state()
    make_model(family_config("gpt2"), "f32", "sdpa")
    make_model(family_config("llama"), "f32", "sdpa")
    make_model(family_config("modernbert-decoder"), "f32", "sdpa")  # draws until all are in bounds
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_context_that_does_not_fit_is_refused():
    decoder = open_decoder(family_config("llama"))
    with pytest.raises(RequestError, match="in a context of 65; expected 1 <= tokens"):
        decoder.build(1, 65)


def test_a_model_without_caches_is_refused():
    config = FAMILIES["llama"](random.Random(0))
    config.num_hidden_layers = 2
    decoder = open_decoder(config)
    assert len(decoder.shapes) == 4
    recurrent = pytest.importorskip("transformers").RwkvConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, attention_hidden_size=16
    )
    with pytest.raises(CaptureError, match="0 of 2 layers have caches"):
        open_decoder(recurrent)


def test_what_is_no_decoder_says_so():
    with pytest.raises(CaptureError, match=r"vit, of which transformers has no decoder; .*capture"):
        open_decoder(ViTConfig(num_hidden_layers=1))
    config = family_config("llama")
    config.num_hidden_layers = 0
    with pytest.raises(CaptureError, match="llama of 0 layers; expected a layer at least"):
        open_decoder(config)


def test_a_class_that_fails_is_one_clear_error():
    config = family_config("llama")
    config.num_key_value_heads = 3
    with pytest.raises(CaptureError, match=r"llama: its class fails on one token \(RuntimeError: "):
        open_decoder(config)


@pytest.mark.filterwarnings("ignore")
def test_an_encoder_is_refused():
    """Its tokens look at those behind them."""
    encoder = BertConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16,
    )  # fmt: skip
    with pytest.raises(CaptureError, match=r"tokens see those behind them; .* use a decoder"):
        open_decoder(encoder)
