"""Experts of 1 to 16 rows inside the kernels: the results of library ops on the same weights."""

import itertools
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from distmega.compiled import CompiledProgram
from distmega.engine.engine import Engine
from distmega.errors import ModelError
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.kernels.hopper.batch import runner
from distmega.kernels.machines import CPU, H200
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.planner import plan_program
from tests.gpu.engines import open_engine, random_model
from tests.kernels.hopper.row_plan.test_expert_queues import NUM_CHOSEN, layers

pytestmark = pytest.mark.gpu

MESH = DeviceMesh(tp=1)
NUM_ROWS = 24
ROUNDING = 2**-6
"""What rounding may move a score, of the highest of its row: some steps of bf16."""
FEW_LAYERS = {"num_layers": 4, "vocab": 32000}


def experts_engine(batch: int = 1) -> Engine:
    """Qwen3-30B-A3B's extents, a few layers of it."""
    return open_engine(random_model("qwen3-30b-a3b", **FEW_LAYERS), batch)


def error(found: Tensor, exact: Tensor) -> Tensor:
    """Of each row."""
    return (found.double() - exact.double()).norm(dim=-1) / exact.double().norm(dim=-1)


def margin(outs: Mapping[str, Tensor], scores: tuple[str, ...]) -> float:
    """Of the scores of a row: what the last expert chosen has more than the next, of the highest;
    the least of all layers.
    """
    ordered = [outs[name][0].float().sort(descending=True).values for name in scores]
    return min(float((x[NUM_CHOSEN - 1] - x[NUM_CHOSEN]) / x.abs().max()) for x in ordered)


def with_outputs(program: Program, names: tuple[str, ...]) -> Program:
    return replace(program, outputs=(*program.outputs, *names))


def random_weights(program: Program, generator: torch.Generator) -> dict[str, Tensor]:
    given = {
        tensor.name: (torch.randn(tensor.shape, generator=generator) * tensor.shape[-1] ** -0.5)
        for tensor in program.with_role("weight")
    }
    return {n: (x.abs() + 0.5 if x.dim() == 1 else x).bfloat16() for n, x in given.items()}


def compiled_on(program: Program) -> dict[str, CompiledProgram]:
    """The program as one kernel of a GPU, and by library ops."""
    return {
        device: CompiledProgram(
            plan_program(program, MESH, machine),
            SingleCommunicator(MESH),
            device,
            megakernel=device != "cpu",
        )
        for device, machine in (("cuda:0", H200), ("cpu", CPU))
    }


def outcome(step: CompiledProgram, values: dict[str, Tensor], device: str) -> Tensor:
    (out,) = step(step.parts({n: x.to(device) for n, x in values.items()})).values()
    return out.clone().cpu()


@pytest.mark.parametrize(
    ("num_rows", "width", "gated", "weighing"),
    [
        (3, 192, True, "softmax_chosen"),
        (8, 768, True, "softmax_chosen"),
        (16, 72, False, "softmax"),
        (16, 1088, True, "values"),
    ],
)
def test_rows_together_give_what_library_ops_do(num_rows, width, gated, weighing):
    """Rows that go to different experts, and all to the same; a second time the same bits; NaN in
    the row that has one, and no more. Rounding may choose for a row in ten.
    """
    program = layers(3, width, rows=num_rows, gated=gated, weighing=weighing)
    generator = torch.Generator().manual_seed(width)
    values, steps = random_weights(program, generator), compiled_on(program)
    size = program.tensor_map()["x"].shape[-1]
    several = [torch.randn(num_rows, size, generator=generator).bfloat16() for _ in range(4)]
    several.append(several[0][:1].repeat(num_rows, 1))
    errors = []
    for x in several:
        found, exact = (outcome(steps[d], {**values, "x": x}, d) for d in ("cuda:0", "cpu"))
        errors.append(error(found, exact))
        assert torch.equal(found, outcome(steps["cuda:0"], {**values, "x": x}, "cuda:0"))
    assert (steps["cuda:0"].stats.num_megakernels, steps["cuda:0"].stats.num_library_ops) == (1, 0)
    assert float(torch.cat(errors).quantile(0.9)) < 2e-2
    bad = several[0].clone()
    bad[1, 3] = float("nan")
    found = outcome(steps["cuda:0"], {**values, "x": bad}, "cuda:0").isnan()
    assert found.any(dim=1).tolist() == found.all(dim=1).tolist()
    assert found.any(dim=1).tolist() == [row == 1 for row in range(num_rows)]
    again = outcome(steps["cuda:0"], {**values, "x": several[0]}, "cuda:0")
    assert bool(again.isfinite().all())


@pytest.mark.parametrize(("width", "gated"), [(192, True), (768, True), (72, False), (1024, True)])
def test_one_launch_gives_what_library_ops_do(width, gated):
    """Of rows that go to different experts, where rounding chooses none; and NaN where a row's
    scores are NaN, no more.
    """
    program = layers(3, width, gated=gated)
    scores = tuple(op.reads[0].tensor for op in program.ops if op.kind == "top_k")
    (made,) = program.outputs
    generator = torch.Generator().manual_seed(width)
    values = random_weights(program, generator)
    rows = torch.randn(NUM_ROWS, 1, program.tensor_map()["x"].shape[-1], generator=generator)
    rows = rows.bfloat16()
    library = CompiledProgram(
        plan_program(with_outputs(program, scores), MESH, CPU),
        SingleCommunicator(MESH),
        "cpu",
        megakernel=False,
    )
    step = CompiledProgram(
        plan_program(program, MESH, H200), SingleCommunicator(MESH), "cuda:0", megakernel=True
    )
    errors = []
    for row in rows:
        expected = library(library.parts({**values, "x": row}))
        parts = step.parts({n: x.to("cuda:0") for n, x in {**values, "x": row}.items()})
        (found,) = step(parts).values()
        if margin(expected, scores) > ROUNDING:
            errors.append(float(error(found.cpu(), expected[made])))
    assert (step.stats.num_megakernels, step.stats.num_library_ops) == (1, 0)
    assert len(errors) >= NUM_ROWS // 2
    assert max(errors) < 2e-2
    bad = rows[0].clone()
    bad[0, 3] = float("nan")
    for row, is_bad in ((bad, True), (rows[1], False)):
        parts = step.parts({n: x.to("cuda:0") for n, x in {**values, "x": row}.items()})
        (out,) = step(parts).values()
        assert bool(out.isnan().all()) == is_bad
        assert bool(out.isnan().any()) == is_bad


def test_decode_gives_the_logits_of_library_ops():
    """A prefill is library ops with the same weights. Where two experts weigh nearly the same,
    rounding chooses, so some rows differ, and what later ones see of them.
    """
    engine = experts_engine()
    vocab = engine.decode_plan.config.vocab
    shape = (40,)
    ids = torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(3)).tolist()
    expected = engine.logits(ids).float()[8:]
    engine.prefill(ids[:8])
    found = torch.cat([engine.decode_step([one])["logits"].clone() for one in ids[8:]]).float()
    errors = error(found, expected)
    print(f"decode beside prefill: median {errors.median():.2e}, most {errors.max():.2e}")
    assert float(errors.median()) < 4e-2


def test_steps_are_bitwise_the_same_in_any_launch():
    engine = experts_engine()
    prompt = list(range(1, 60))
    many = list(itertools.islice(engine.generate(prompt, ignore_eos=True), 200))
    assert many == list(itertools.islice(engine.generate(prompt, ignore_eos=True), 200))
    one = [engine.prefill(prompt)]
    while len(one) < 32:
        one.append(engine.decode(one[-1]))
    assert many[:32] == one


@pytest.mark.parametrize("batch", [3, 8, 16])
def test_sequences_together_give_the_logits_of_library_ops(batch):
    """As above, sequences of different lengths; and the experts that were read are at most those
    that rows choose.
    """
    engine = experts_engine(batch)
    config = engine.decode_plan.config
    generator = torch.Generator().manual_seed(batch)
    num = 6
    prompts = [
        torch.randint(0, config.vocab, (5 + 3 * slot + num,), generator=generator).tolist()
        for slot in range(batch)
    ]
    exact = torch.stack([engine.logits(ids)[-num:].float().clone() for ids in prompts])
    for slot, ids in enumerate(prompts):
        engine.prefill(ids[:-num], slot)
    stepping = engine.stepping
    assert stepping is not None
    before = stepping.num_hits
    steps = zip(*(ids[-num:] for ids in prompts), strict=True)
    found = torch.stack([engine.decode_step(tokens)["logits"].clone() for tokens in steps], 1)
    errors = error(found.float(), exact)
    print(f"batch {batch} beside prefill: median {errors.median():.2e}, most {errors.max():.2e}")
    assert float(errors.median()) < 2e-2
    hits = (stepping.num_hits - before) / (num * config.num_layers)
    print(f"experts hit a layer: {hits:.1f}")
    assert config.experts_per_token <= hits
    assert hits <= min(config.num_experts, batch * config.experts_per_token)


def test_steps_of_a_batch_are_bitwise_the_same():
    engine = experts_engine(8)
    prompts = [list(range(1, 20 + 5 * slot)) for slot in range(8)]
    runs = [
        list(itertools.islice(engine.generate_all(prompts, ignore_eos=True), 100)) for _ in range(2)
    ]
    assert runs[0] == runs[1]
    one = [tuple(engine.prefill_all(prompts))]
    while len(one) < 24:
        one.append(tuple(engine.decode_step(one[-1])["next"].tolist()))
    assert runs[0][:24] == one


def test_many_steps_of_a_batch_repeat_bit_by_bit():
    """Tokens of 500 steps of 16 sequences, from the same caches."""
    engine = experts_engine(16)
    stepping = engine.stepping
    assert stepping is not None
    runs = []
    for _ in range(2):
        for cache in engine.decode_plan.states.tensors:
            engine.tensor(cache).zero_()
        stepping.start(range(1, 17), [16 * slot for slot in range(16)])
        runs.append(torch.cat([stepping.run_steps(100).clone() for _ in range(5)]))
    assert torch.equal(*runs)


def test_a_trace_of_sequences_has_what_each_sm_does():
    engine = open_engine(random_model("qwen3-30b-a3b", num_layers=2, vocab=32000), 4)
    spans = engine.trace(2, 100)
    assert isinstance(engine.stepping, runner.BatchRunner)
    queues = engine.stepping.queues.queues
    tasks = [span for span in spans if span.args]
    assert len(tasks) == 2 * sum(map(len, queues))
    assert len([span for span in spans if span.name == "choose experts"]) == 2 * 2 * len(queues)
    assert all(0 < span.duration_us < 1e4 for span in tasks)
    loads = [span for span in spans if span.track == "SM 5 loads"]
    assert len(loads) == 2 * len(queues[5]) - 1
    assert all(span.duration_us >= 0 for span in loads)


def test_no_tile_is_overwritten_while_it_is_read(monkeypatch):
    """A step from one state, over and over, with as many loads under way as the ring has slots:
    before reads were fenced from the copy engine's writes, 1 launch in 50 differed.
    """
    monkeypatch.setattr(runner, "BATCH_LOADS_AHEAD", runner.STAGES)
    engine = open_engine(random_model("qwen3-30b-a3b", num_layers=2, vocab=32000), 16)
    stepping, found = engine.stepping, []
    assert isinstance(stepping, runner.BatchRunner)
    for _ in range(1000):
        stepping.start(range(1, 17), [16 * slot for slot in range(16)])
        stepping.run_steps(1)
        found.append(stepping.logits.clone())
    assert all(torch.equal(found[0], each) for each in found)


def test_fewer_sequences_read_fewer_experts():
    """Three in a kernel for 16 read no more than three rows' experts."""
    engine = experts_engine(16)
    config, stepping = engine.decode_plan.config, engine.stepping
    assert stepping is not None
    prompts = [[1, 2, 3], [7], [5, 9]]
    first = list(itertools.islice(engine.generate_all(prompts, ignore_eos=True), 20))
    assert first == list(itertools.islice(engine.generate_all(prompts, ignore_eos=True), 20))
    before = stepping.num_hits
    stepping.start([1, 2, 3], [3, 1, 2])
    stepping.run_steps(4)
    most = 4 * config.num_layers * 3 * config.experts_per_token
    assert 0 < stepping.num_hits - before <= most


@pytest.mark.parametrize("batch", [1, 4])
def test_scores_that_are_none_are_a_named_error(batch):
    """No wait is left open, nothing is read that is no expert's, and the engine says so."""
    engine = experts_engine(batch)
    router = engine.tensor("layers.2.router")
    router[5, 7] = float("nan")
    with pytest.raises(ModelError, match="logits that are NaN"):
        list(itertools.islice(engine.generate_all([[1, 2, 3]] * batch, ignore_eos=True), 8))
