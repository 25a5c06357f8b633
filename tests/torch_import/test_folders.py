"""Hugging Face folders of families that we don't write ourselves, through the Engine."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.core_model_loading import Chunk, WeightConverter

import distmega
from distmega.cli.explain import collect_decode, write_report
from distmega.cli.main import main
from distmega.engine.decode_planner import lower_decode, lower_library_decode, plan_decode
from distmega.engine.engine import Engine
from distmega.engine.prefill_planner import lower_prefill
from distmega.errors import ModelError, PlanError, RequestError
from distmega.kernels.machines import H200
from distmega.sources.locate import read_config
from distmega.torch_import.huggingface.decoders import HfDecoder
from tests.hostir.run.test_capture import breaks, kinds_of, run_ops
from tests.models.files import save_tokenizer
from tests.torch_import.huggingface.test_decoders import family_config, reference

RANK = distmega.RankContext(
    rank=0, world_size=1, local_rank=0, local_world_size=1, node="here", backend="gloo",
    device="cpu",
)  # fmt: skip
VOCAB = 288
EVERY = "mamba", "mamba2", "jamba", "falcon_h1", "gemma2", "gptj", "falcon-alibi", "mpt", "gpt_oss"


def save_model(folder: Path, name: str) -> nn.Module:
    """A small model of a family as transformers saves it, with a tokenizer of bytes."""
    config = family_config(name)
    config.vocab_size = VOCAB
    model = reference(config)
    model.save_pretrained(folder)
    save_tokenizer(folder, VOCAB)
    return model


@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        "phi3",
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in ("gpt_neox", "gemma2", "falcon-alibi", "granitemoe", "phimoe")
        ),
    ],
)
def test_greedy_tokens_equal_those_of_transformers(name: str, tmp_path: Path):
    model = save_model(tmp_path, name)
    prompts, num = [[5, 9, 77, 30, 12], [200, 3]], 20
    options = distmega.EngineOptions(max_context=32, batch=2)
    engine = distmega.open_engine(RANK, distmega.open_model(tmp_path), 1, options)
    found = [*engine.generate_all(prompts, num)]
    for place, ids in enumerate(prompts):
        expected = model.generate(
            torch.tensor([ids]), max_new_tokens=num, do_sample=False, pad_token_id=0,
            eos_token_id=VOCAB + 1, attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        )  # fmt: skip
        assert [int(step[place]) for step in found] == expected[0, len(ids) :].tolist()


@pytest.mark.parametrize(
    "name",
    [
        "lfm2",
        *(
            pytest.param(each, marks=pytest.mark.nightly)
            for each in ("mamba", "falcon_h1", "jamba")
        ),
    ],
)
def test_sequences_of_a_model_with_states_go_on_apart(name: str, tmp_path: Path):
    model = save_model(tmp_path, name)
    texts = torch.randint(3, VOCAB, (2, 7)).tolist()
    options = distmega.EngineOptions(max_context=16, batch=2)
    source = distmega.open_model(tmp_path)
    engine = distmega.open_engine(RANK, source, 1, options, logits="last")
    for slot, ids in enumerate(texts):
        engine.prefill(ids[:3], slot)
    found: list[list[torch.Tensor]] = [[], []]
    for step, num in enumerate([2, 1, 1, 2]):  # the second one waits for two steps
        given = [texts[0][3 + step], texts[1][[3, 4, 4, 4][step]]][:num]
        scores = engine.decode_step(given)["logits"]
        for slot in range(num):
            found[slot].append(scores[slot].clone())
    with torch.no_grad():
        expected = model(torch.tensor(texts)).logits
    for slot, rows in enumerate(found):
        torch.testing.assert_close(
            torch.stack(rows), expected[slot, 3 : 3 + len(rows)], rtol=1e-4, atol=1e-4
        )
    scores = engine.logits(texts[1])
    torch.testing.assert_close(scores, expected[1], rtol=1e-4, atol=1e-4)
    check_an_interrupted_step(engine, texts, expected)


def check_an_interrupted_step(
    engine: Engine, texts: list[list[int]], expected: torch.Tensor
) -> None:
    """It ends the sequences whose states may have taken its tokens, and those alone."""
    for slot, ids in enumerate(texts):
        engine.prefill(ids[:3], slot)
    run = engine._decode.runner.run

    def interrupted(tensors: Mapping[str, torch.Tensor]) -> None:
        run(tensors)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._decode.runner, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.decode_step([texts[0][3]])
    with pytest.raises(RequestError, match="slot 0, in which no sequence has started"):
        engine.decode_step([texts[0][3]])
    engine.prefill(texts[0][:3])
    found = [engine.decode_step([ids[at] for ids in texts])["logits"].clone() for at in (3, 4)]
    torch.testing.assert_close(torch.stack(found, 1), expected[:, 3:5], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name",
    ["qwen3_next", *(pytest.param(each, marks=pytest.mark.nightly) for each in (*EVERY, "lfm2"))],
)
def test_passes_and_steps_can_be_graphs(name: str, tmp_path: Path):
    """One token a pass where states are kept, which each token changes."""
    save_model(tmp_path, name)
    config = distmega.open_model(tmp_path).config
    options = distmega.EngineOptions(max_context=32, batch=3)
    staged = plan_decode(config, distmega.DeviceMesh(tp=1), H200, options)
    plan = lower_decode(config, staged, options, peer_memory=False)
    num_rows = 1 if config.recurrent_states else 20
    for host in (lower_library_decode(plan), lower_prefill(plan, num_rows, "none")):
        assert not breaks(host)
        run_ops(host, kinds_of(host) - {"attention"})


def test_a_pipeline_of_recurrent_layers_is_refused_before_anything_runs(tmp_path: Path):
    save_model(tmp_path, "mamba")
    config, mesh = distmega.open_model(tmp_path).config, distmega.DeviceMesh(pp=2, tp=1)
    with pytest.raises(PlanError, match="2 pipeline stages of a model whose layers keep recurrent"):
        plan_decode(config, mesh, distmega.CPU, distmega.EngineOptions(max_context=32))


def test_a_plan_of_such_a_folder_is_explained(tmp_path: Path):
    save_model(tmp_path, "granite")
    mesh = distmega.DeviceMesh(tp=2)
    options = distmega.EngineOptions(max_context=32)
    report = collect_decode(
        "granite", read_config(tmp_path), mesh, distmega.CPU, options, full=True
    )
    texts = dict(write_report(report, full=True))
    assert "attention" in texts["plan"]
    assert "operators of torch" not in texts["plan"]


@pytest.mark.nightly
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_commands_take_such_folders(num_ranks: int, tmp_path: Path, capsys):
    model = save_model(tmp_path, "phi")
    main(
        ["generate", str(tmp_path), "hi there", "--max-new-tokens", "6", "--max-context", "32",
         "--tp", str(num_ranks)]
    )  # fmt: skip
    text, figures, _ = capsys.readouterr().out.partition("\n[")
    assert figures
    source = distmega.open_model(tmp_path)
    tokenizer = source.tokenizer()
    prompt = tokenizer.encode("hi there")
    found = model.generate(
        torch.tensor([prompt]), max_new_tokens=6, do_sample=False, pad_token_id=0,
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
    )[0, len(prompt) :].tolist()  # fmt: skip
    assert tokenizer.decode(found).strip() == text.strip()
    main(["explain", str(tmp_path), "--tp", "2"])
    explained = " ".join(capsys.readouterr().out.split())  # the folder's name may break lines
    assert "(3 layers) on tp=2" in explained
    assert "self_attn.q_proj" in explained


@pytest.mark.parametrize("name", ["jamba"])
def test_matrices_of_experts_that_lie_apart_are_put_together(name: str, tmp_path: Path):
    model = save_model(tmp_path, name)
    source = distmega.open_model(tmp_path)
    stored = source.readers.stored
    fused = {
        n: x for n, x in model.state_dict().items() if n.endswith(("gate_up_proj", "down_proj"))
    }
    assert fused
    for each, expected in fused.items():
        found = torch.from_numpy(stored[f"{each}"].read((slice(1, 2), slice(3, 40), slice(5, 20))))
        torch.testing.assert_close(found, expected[1:2, 3:40, 5:20])


def test_code_of_a_folder_is_never_run(tmp_path: Path):
    own = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(own))
    (tmp_path / "mine.py").write_text("raise SystemExit('run')")
    with pytest.raises(ModelError, match=r"brings code of its own; .*such code is never run"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("hrm_text9", r"did you mean 'hrm_text'\? if not, run: pip install -U transformers"),
        ("zzzz", r"run: pip install -U transformers, or use another model"),
    ],
)
def test_a_type_that_nobody_knows_is_told_which_there_are(kind: str, remedy: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    known = rf"'{kind}' in .*; expected one of llama, .* decoders of transformers \d.* in all, .*; "
    with pytest.raises(ModelError, match=known + remedy):
        read_config(tmp_path)


def test_what_is_wrong_with_a_request_is_told_before_its_model_is_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    save_model(tmp_path, "gpt_neox")
    monkeypatch.setattr(HfDecoder, "build", None)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"

    def refusal(*arguments: str) -> str:
        assert main(["generate", *arguments]) == 2
        return " ".join(capsys.readouterr().err.split())

    few = ("--max-context", "16", "--max-new-tokens", "16")
    found = refusal(str(tmp_path), "hi", *few)
    assert (
        "a prompt of at least 1 token and 16 new ones; expected at most 16 positions together"
        in found
    )
    one = ("hi", "--max-new-tokens", "1")
    assert "config.json alone, without weights" in refusal(str(config), *one)
    kept = weights.rename(tmp_path / "kept")
    found = refusal(str(tmp_path), *one)
    assert "has no *.safetensors file" in found
    assert "random weights" not in found
    kept.rename(weights)
    (tmp_path / "tokenizer.json").unlink()
    assert "tokenizer.json" in refusal(str(tmp_path), *one)


def test_weights_that_do_not_fit_are_named(tmp_path: Path):
    save_model(tmp_path, "granite")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    norm = next(name for name in tensors if name.endswith("norm.weight"))
    save_file({**tensors, norm: torch.ones(3)}, path)
    with pytest.raises(ModelError, match=rf"{norm} in .* is F32\[3\]; expected F32, F16, BF16 of"):
        distmega.open_model(tmp_path)
    save_file({name: x for name, x in tensors.items() if name != norm}, path)
    with pytest.raises(ModelError, match=f"lacks 1 of .* weights: {norm}"):
        distmega.open_model(tmp_path)


@pytest.mark.parametrize("name", ["gpt2", "phimoe"])
def test_a_model_that_was_saved_without_its_head(name: str, tmp_path: Path):
    """Its names lack the prefix, also those of experts that files hold apart."""
    model = save_model(tmp_path, name)
    model.base_model.save_pretrained(tmp_path / "base")
    kept = tmp_path / "base" / "config.json"
    config = json.loads((tmp_path / "config.json").read_text())
    kept.write_text(json.dumps({**config, "tie_word_embeddings": True}))
    stored = distmega.open_model(tmp_path / "base").readers.stored
    for each, parameter in model.base_model.named_parameters():
        found = stored[f"{model.base_model_prefix}.{each}"]
        torch.testing.assert_close(torch.from_numpy(found.read()), parameter.detach())
    kept.write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with pytest.raises(ModelError, match=r"without its head: it lacks lm_head\.weight; .* causal"):
        distmega.open_model(tmp_path / "base")


def save_more(folder: Path, **more: torch.Tensor) -> None:
    """Adds arrays to a saved model's file."""
    path = folder / "model.safetensors"
    save_file({**load_file(path), **more}, path)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.o_proj.bias",
        "model.layers.0.self_attn.sinks",
        "model.layers.9.input_layernorm.weight",
        "lm_head.bias",
        "layers.0.mlp.extra.weight",
    ],
)
def test_weights_that_no_layer_uses_are_refused(name: str, tmp_path: Path):
    save_model(tmp_path, "granite")
    save_more(tmp_path, **{name: torch.zeros(4)})
    with pytest.raises(ModelError, match=f"holds 1 weight that the model does not use: {name};"):
        distmega.open_model(tmp_path)


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("granite", {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
        ("gpt2", {"h.0.attn.bias": torch.ones(1, 1, 8, 8).tril()}),
        ("gpt2", {"transformer.h.0.attn.masked_bias": torch.tensor(-1e4)}),
        ("gpt_neox", {"gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 8, 8)}),
    ],
)
def test_what_old_classes_stored_is_accepted(
    family: str, more: dict[str, torch.Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    save_model(tmp_path, family)
    save_more(tmp_path, **more)
    distmega.open_model(tmp_path)
    assert not caplog.records


def test_parts_that_a_class_leaves_out_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    save_model(tmp_path, "whisper")
    save_more(tmp_path, **{"model.encoder.layers.0.fc1.weight": torch.ones(4)})
    distmega.open_model(tmp_path)
    assert "WhisperForCausalLM does not have, which are left out: model.encoder" in caplog.text


@pytest.mark.parametrize("same", [True, False])
def test_a_head_beside_a_tied_embedding_is_the_embedding(same: bool, tmp_path: Path):
    model = save_model(tmp_path, "gemma2")
    embedding = model.get_input_embeddings().weight.detach()
    save_more(tmp_path, **{"lm_head.weight": embedding.clone() if same else embedding + 1})
    if same:
        distmega.open_model(tmp_path)
        return
    with pytest.raises(ModelError, match=r"^lm_head\.weight in .*, which is not model\.embed_tok"):
        distmega.open_model(tmp_path)


def test_matrices_that_files_hold_side_by_side_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As transformers cuts them for classes that say so; rows are read where they lie."""
    model = save_model(tmp_path, "granite")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    names = [name for name in tensors if name.endswith("mlp.gate_proj.weight")]
    for gate in names:
        up = gate.replace("gate", "up")
        tensors[gate.replace("gate", "fused")] = torch.cat([tensors.pop(gate), tensors.pop(up)])
    save_file(tensors, path)
    with pytest.raises(ModelError, match=r"lacks \d+ of"):
        distmega.open_model(tmp_path)
    cut = WeightConverter(
        "mlp.fused_proj.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], [Chunk(dim=0)]
    )
    monkeypatch.setattr(
        "distmega.torch_import.huggingface.source.get_model_conversion_mapping", lambda _: [cut]
    )
    stored = distmega.open_model(tmp_path).readers.stored
    for gate in names:
        for name in (gate, gate.replace("gate", "up")):
            found = torch.from_numpy(stored[name].read((slice(3, 9), slice(2, 5))))
            assert torch.equal(found, model.get_parameter(name)[3:9, 2:5])
