"""Kv heads that are copied for more ranks than there are: the same results, read in parts, planned
where it costs less.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from distmega.engine.decode_plan import model_mesh
from distmega.engine.decode_planner import kv_copies_to_try, lower_decode, plan_decode
from distmega.engine.engine import Engine
from distmega.engine.requests import EngineOptions
from distmega.errors import PlanError
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.kernels.hopper.row_plan.queues import build_queues
from distmega.kernels.machines import CPU, H200
from distmega.models.presets import PRESETS
from distmega.models.weights.kv_copies import copy_kv_heads, most_copies
from distmega.models.weights.random_source import RandomReader
from distmega.models.weights.tensors import weight_specs
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.localize import localize
from distmega.sharding.search.cost import Machine
from distmega.sharding.search.predict import predict_us
from distmega.sources.copied_source import open_copies
from distmega.sources.load import open_model
from distmega.torch_import.huggingface.decoders import open_decoder
from tests.torch_import.huggingface.test_decoders import family_config

OPTIONS = EngineOptions(max_context=32)


def uneven(name: str):
    """A model of two kv heads with three query heads each, which two copies can't share evenly."""
    source = open_model(name)
    config = replace(source.config, num_heads=6, num_kv_heads=2)
    readers = {n: RandomReader(spec=spec, seed=0) for n, spec in weight_specs(config).items()}
    return replace(source, config=config, readers={**source.readers, **readers})


@pytest.mark.parametrize("copies", [2, 3])
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen2", "tiny-qwen3"])
def test_copies_change_no_result(name: str, copies: int):
    source, mesh = uneven(name), DeviceMesh(tp=1)
    ids = [5, 9, 200, 31, 7]
    found = [
        Engine(model, mesh, SingleCommunicator(mesh), OPTIONS).logits(ids)
        for model in (source, open_copies(source, copies))
    ]
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_copies_are_read_in_parts():
    source = uneven("tiny-qwen2")
    copied = open_copies(source, 2)
    assert copied.config == copy_kv_heads(source.config, 2)
    assert (copied.config.num_kv_heads, copied.config.group) == (4, 2)
    whole, of_keys = (source.weight(f"layers.1.{name}").read() for name in ("wq", "wk"))
    heads = copied.weight("layers.1.wq").read()
    np.testing.assert_array_equal(heads[0::2], whole[:, :2])
    np.testing.assert_array_equal(heads[1::2, :1], whole[:, 2:])
    assert not heads[1::2, 1:].any()
    keys = copied.weight("layers.1.wk").read()
    np.testing.assert_array_equal(keys, of_keys.repeat(2, 0))
    rng = np.random.default_rng(0)
    for name in ("wq", "wk", "wv", "wo", "bq", "bk", "bv", "q_norm", "w_up"):
        if f"layers.0.{name}" not in copied.readers:
            continue
        reader = copied.weight(f"layers.0.{name}")
        full = reader.read()
        assert full.shape == reader.shape == weight_specs(copied.config)[f"layers.0.{name}"].shape
        for _ in range(5):
            ends = [sorted(rng.integers(0, extent + 1, 2).tolist()) for extent in reader.shape]
            part = tuple(slice(*bounds) for bounds in ends)
            np.testing.assert_array_equal(reader.read(part), full[part], err_msg=f"{name} {part}")
    assert open_copies(source, 1) is source


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "copies"),
    [(32, 8, 8, (1,)), (28, 4, 8, (1, 2)), (4, 2, 4, (1, 2)), (9, 3, 2, (1,)), (9, 3, 9, (1, 2, 3)),
     (8, 1, 8, (1, 5, 8)), (4, 2, 9, (1,))],
)  # fmt: skip
def test_copies_are_tried_where_heads_do_not_divide(
    heads: int, kv_heads: int, tp: int, copies: tuple[int, ...]
):
    config = replace(PRESETS["tiny-llama"], num_heads=heads, num_kv_heads=kv_heads)
    assert kv_copies_to_try(config, model_mesh(tp, 1)) == copies
    assert max(copies) <= most_copies(config)
    whole = replace(config, qk_norm=True, qk_norm_whole=True)
    assert kv_copies_to_try(whole, model_mesh(tp, 1)) == (1,)


def test_the_cheapest_way_is_planned():
    """Query heads of each kv head divide too, but then every rank reads all keys and values."""
    config = replace(PRESETS["llama-3.2-1b"], num_heads=32, num_kv_heads=2)
    mesh, options = model_mesh(4, 1), EngineOptions(max_context=32768)
    staged = plan_decode(config, mesh, H200, options)
    assert staged.kv_copies == 2
    alone = plan_decode(copy_kv_heads(config, 2), mesh, H200, options)
    assert staged.plan.fingerprint() == alone.plan.fingerprint()
    lowered = lower_decode(config, staged, options, peer_memory=True)
    assert lowered.config.num_kv_heads == 4
    cache = localize(staged.plan).program.tensor_map()["layers.0.k_cache"]
    assert cache.shape[0] == 1
    assert predict_us(localize(staged.plan).program, mesh, H200) > 0


def test_the_decode_kernel_takes_copies():
    config = replace(PRESETS["llama-3.2-1b"], num_heads=14, num_kv_heads=2, num_layers=2)
    staged = plan_decode(config, model_mesh(4, 1), H200, OPTIONS)
    lowered = lower_decode(config, staged, OPTIONS, peer_memory=True)
    (segment,) = lowered.host.segments
    queues = build_queues(segment, lowered.weights, lowered.states, 132, 3)
    shape = queues.attention
    assert shape is not None
    assert (staged.kv_copies, shape.num_kv_heads, shape.num_queries) == (2, 1, 4)


def test_stages_agree_on_copies():
    config = replace(PRESETS["tiny-llama"], num_heads=4, num_kv_heads=2)
    staged = [plan_decode(config, model_mesh(4, 2), CPU, OPTIONS, index=n) for n in (0, 1)]
    assert [one.kv_copies for one in staged] == [2, 2]
    assert staged[0].cuts == staged[1].cuts


def test_too_many_ranks_are_told_how_many_can_share():
    config = PRESETS["tiny-qwen3"]
    with pytest.raises(
        PlanError, match=r"tp=9 can't divide attention of 2 kv heads, 2 query .* use tp=7 or less"
    ):
        plan_decode(config, model_mesh(9, 1), CPU, OPTIONS)
    assert plan_decode(config, model_mesh(7, 1), CPU, OPTIONS).kv_copies == 2


def test_models_whose_heads_are_not_copied_say_so():
    olmoe = replace(open_model("tiny-olmoe").config, num_heads=4, num_kv_heads=2)
    granite = open_decoder(family_config("granite"))
    for config in (olmoe, granite):
        assert (config.num_kv_heads, config.group, most_copies(config)) == (2, 2, 1)
        with pytest.raises(
            PlanError,
            match=r"2 query heads per kv head, which this model's decoder can't copy to several "
            r"ranks; .* use tp=3 or less, and pp for more ranks",
        ):
            plan_decode(config, model_mesh(4, 1), CPU, OPTIONS)


@pytest.mark.parametrize("batch", [2, 3, 8])
@pytest.mark.parametrize("machine", [CPU, H200])
def test_no_cache_is_shared_out_by_sequences(machine: Machine, batch: int):
    """A prefill writes all of a sequence's cache, on every rank, where heads can't be divided."""
    config = replace(open_model("tiny-olmoe").config, num_heads=4, num_kv_heads=1)
    assert most_copies(config) == 1
    options = replace(OPTIONS, batch=batch)
    local = localize(plan_decode(config, DeviceMesh(tp=4), machine, options).plan)
    caches = local.program.with_role("state")
    assert caches
    assert {cache.shape[0] for cache in caches} == {batch}
