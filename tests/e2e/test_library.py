"""The library as its users call it: a plan compiled for each rank, prompts answered in one call."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

import distmega
from distmega.cli.main import main
from distmega.compiled import CompiledProgram
from distmega.errors import MeshError, ModelError, PlanError, ProgramError, RequestError
from distmega.hostir import SingleCommunicator
from distmega.launch import LauncherOptions
from tests.hostir.threads import ThreadCommunicator, Wires

CPU_RANK = distmega.RankContext(
    rank=0, world_size=1, local_rank=0, local_world_size=1, node="here", backend="gloo",
    device="cpu",
)  # fmt: skip


def mlp() -> distmega.Program:
    """y = silu(x w1') w2' with an inner extent that two ranks can't halve."""
    p = distmega.ProgramBuilder("mlp")
    h = p.linear(p.input("x", (4, 6)), p.weight("w1", (7, 6))).map("silu(a0)")
    return p.build(p.linear(h, p.weight("w2", (6, 7)), name="y"))


def values() -> dict[str, torch.Tensor]:
    """Whole tensors; small integers times a power of two."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (4, 6), "w1": (7, 6), "w2": (6, 7)}
    return {
        name: torch.randint(-4, 5, shape, generator=generator) / 4 for name, shape in shapes.items()
    }


def in_torch(given: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.silu(given["x"] @ given["w1"].T) @ given["w2"].T


def test_a_plan_runs_on_one_rank():
    plan = distmega.plan_program(mlp(), distmega.DeviceMesh(tp=1), distmega.CPU)
    step = distmega.compile_plan(plan, CPU_RANK)
    given = values()
    torch.testing.assert_close(step(step.parts(given))["y"], in_torch(given))


def test_ranks_take_unequal_parts_of_whole_tensors():
    marks = {"w1": distmega.shard(0, "tp"), "w2": distmega.shard(1, "tp")}
    mesh = distmega.DeviceMesh(tp=2)
    plan = distmega.plan_program(mlp(), mesh, distmega.CPU, marks)
    wires, given = Wires(mesh), values()
    steps = [CompiledProgram(plan, ThreadCommunicator(mesh, rank, wires)) for rank in (0, 1)]
    assert [step.slices("w1")[0] for step in steps] == [slice(0, 4), slice(4, 7)]
    last = steps[1].part("w1", given["w1"])
    assert last.shape == (4, 6)
    assert torch.equal(last[3], torch.zeros(6))
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda step: step(step.parts(given))["y"], steps))
    for y in found:
        torch.testing.assert_close(y, in_torch(given))


def cache_program() -> distmega.Program:
    """y = x + the state s, into which x is appended first."""
    p = distmega.ProgramBuilder("cached")
    x, at = p.input("x", (2, 1, 4)), p.input("at", (2,), "i64")
    cache = p.state("s", (1, 8, 4))
    p.kv_append(cache, x, at)
    return p.build(x.map("a0 + a0", name="y"))


@pytest.mark.parametrize("rows", [8, 16], ids=["contiguous", "strided"])
def test_a_state_has_memory_of_its_own_unless_asked_otherwise(rows: int):
    plan = distmega.plan_program(cache_program(), distmega.DeviceMesh(tp=1), distmega.CPU)
    step = distmega.compile_plan(plan, CPU_RANK)
    state = torch.zeros(1, rows, 4)[:, :: rows // 8]
    given = {"x": torch.ones(2, 1, 4), "at": torch.tensor([2, 5]), "s": state}
    parts = step.parts(given)
    step(parts)
    assert parts["s"].sum() == 8
    assert state.sum() == 0
    if rows == 8:
        step(step.parts(given, copy=False))
        assert state.nonzero()[:, 1].unique().tolist() == [2, 5]
    else:
        with pytest.raises(ProgramError, match=r"'s' on rank 0 isn't contiguous .* out copy="):
            step.part("s", state, copy=False)


@pytest.mark.gpu
def test_parts_on_a_gpu_are_copies_of_what_the_host_holds():
    plan = distmega.plan_program(mlp(), distmega.DeviceMesh(tp=1), distmega.H200)
    step = CompiledProgram(plan, SingleCommunicator(plan.mesh), "cuda:0")
    given = values()
    torch.testing.assert_close(step(step.parts(given))["y"].cpu(), in_torch(given))
    with pytest.raises(ProgramError, match="is on cpu, not on cuda:0"):
        step.part("w1", given["w1"], copy=False)
    there = {name: value.cuda() for name, value in given.items()}
    assert step.part("w1", there["w1"], copy=False).data_ptr() == there["w1"].data_ptr()
    torch.testing.assert_close(step(step.parts(there, copy=False))["y"].cpu(), in_torch(given))
    with pytest.raises(ProgramError, match=r"meta f32\[4, 6\] for input 'x'"):
        step({**step.parts(there), "x": torch.zeros(4, 6, device="meta")})


def test_no_view_is_a_part_with_zeros_behind_it():
    marks = {"w1": distmega.shard(0, "tp"), "w2": distmega.shard(1, "tp")}
    mesh = distmega.DeviceMesh(tp=2)
    plan = distmega.plan_program(mlp(), mesh, distmega.CPU, marks)
    first, last = (
        CompiledProgram(plan, ThreadCommunicator(mesh, rank, Wires(mesh))) for rank in (0, 1)
    )
    given = values()
    assert first.part("w1", given["w1"], copy=False).data_ptr() == given["w1"].data_ptr()
    with pytest.raises(ProgramError, match=r"\[3, 6\], and has zeros behind it up to \[4, 6\]"):
        last.part("w1", given["w1"], copy=False)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("w3", torch.zeros(1), r"a value for 'w3'; expected one of \['w1', 'w2', 'x'\]"),
        ("w1", torch.zeros(6, 7), r"f32\[6, 7\] for weight 'w1'; expected f32\[7, 6\]"),
        ("x", torch.zeros(4, 6).half(), r"f16\[4, 6\] for input 'x'; expected f32\[4, 6\]"),
        ("x", None, r"NoneType, no tensor for input 'x'; expected f32\[4, 6\]"),
        ("x", [[0.0] * 6] * 4, r"list, no tensor for input 'x'"),
        ("x", torch.zeros(4, 6, device="meta"), r"meta f32\[4, 6\] for input 'x'"),
        ("x", torch.zeros(4, 6).to_sparse(), r"torch.sparse_coo f32\[4, 6\] for input 'x'"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused(name: str, tensor: torch.Tensor, message: str):
    plan = distmega.plan_program(mlp(), distmega.DeviceMesh(tp=1), distmega.CPU)
    step = distmega.compile_plan(plan, CPU_RANK)
    with pytest.raises(ProgramError, match=message):
        step.part(name, tensor)
    if name == "x":
        with pytest.raises(ProgramError, match=message):
            step({**step.parts(values()), name: tensor})
    for call in (step, step.parts):
        with pytest.raises(ProgramError, match="NoneType in place of tensors by name"):
            call(None)
    with pytest.raises(ProgramError, match="tensor 'w3'; expected one of program 'mlp'"):
        step.slices("w3")


def test_a_mesh_of_other_ranks_is_refused():
    plan = distmega.plan_program(mlp(), distmega.DeviceMesh(tp=2), distmega.CPU)
    with pytest.raises(MeshError, match=r"mesh\(tp=2\) in a job of 1 rank; expected a mesh of"):
        distmega.compile_plan(plan, CPU_RANK)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 1}, "rank 1 of 1; expected whole numbers, ranks from 0"),
        ({"rank": "0"}, "rank '0' of 1"),
        ({"world_size": 0}, "rank 0 of 0"),
        ({"local_rank": -1}, "local_rank -1 of 1"),
        ({"backend": "mpi"}, "backend 'mpi'; expected one of gloo, nccl"),
        ({"device": "tpu"}, "device 'tpu'; expected cpu or cuda:i"),
        ({"device": None}, "device None; expected"),
    ],
)
def test_a_place_that_can_not_be_is_refused(changes: dict[str, object], message: str):
    with pytest.raises(RequestError, match=f"^a rank's context with {message}"):
        replace(CPU_RANK, **changes)


@pytest.mark.parametrize("device", ["cuda:7", "cuda"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_gpu_that_is_not_there_is_named(
    device: str, num_ranks: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    plan = distmega.plan_program(mlp(), distmega.DeviceMesh(tp=num_ranks), distmega.H200)
    context = replace(CPU_RANK, device=device, backend="nccl", world_size=num_ranks)
    named = rf"device '{device}', where torch \S+ finds 0 GPUs; expected a GPU of this machine"
    with pytest.raises(RequestError, match=named):
        distmega.compile_plan(plan, context)
    comm = ThreadCommunicator(plan.mesh, 0, Wires(plan.mesh))
    with pytest.raises(RequestError, match=named):
        CompiledProgram(plan, comm, device)
    with pytest.raises(RequestError, match="device 'tpu'; expected cpu or cuda:i"):
        CompiledProgram(plan, comm, "tpu")


def test_what_is_no_context_no_rules_and_no_limit_is_refused():
    plan = distmega.plan_program(mlp(), distmega.DeviceMesh(tp=1), distmega.CPU)
    with pytest.raises(ProgramError, match="NoneType in place of a RankContext; expected"):
        distmega.compile_plan(plan, None)
    with pytest.raises(ProgramError, match="rules 3; expected a sequence of RewriteRule"):
        distmega.compile_plan(plan, CPU_RANK, rules=3)
    with pytest.raises(ProgramError, match=r"rules \('x',\); expected a sequence of RewriteRule"):
        distmega.compile_plan(plan, CPU_RANK, rules=("x",))
    for limit in ("1", 0, -1, 1.5):
        with pytest.raises(PlanError, match=r"^memory_limit_bytes"):
            distmega.plan_program(
                mlp(), distmega.DeviceMesh(tp=1), distmega.CPU, memory_limit_bytes=limit
            )


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "gpt-9"}, ModelError, "gpt-9"),
        ({"tp": 3, "pp": 5}, PlanError, "5 stages of a model of 2 layers"),
    ],
)
def test_a_wrong_request_starts_no_ranks(
    changes: dict[str, object], error: type[Exception], message: str, monkeypatch
):
    monkeypatch.setattr("distmega.generation.launch", lambda *given: pytest.fail("ranks started"))
    request = distmega.GenerateRequest(**{"model": "tiny-llama", "prompts": ("a",), **changes})
    with pytest.raises(error, match=message):
        distmega.generate(request, LauncherOptions())


def test_generate_under_torchrun_names_what_to_call(monkeypatch):
    request = distmega.GenerateRequest(model="tiny-llama", prompts=("a",))
    with pytest.raises(RequestError, match="generate under torchrun; expected the launcher local"):
        distmega.generate(request, LauncherOptions(launcher="torchrun"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: request(prompts="hello"), "prompts 'hello'; expected texts in a tuple"),
        (lambda: request(prompts=(1,)), r"prompts \(1,\); expected texts in a tuple"),
        (lambda: request(tp="2"), "^tp '2'; expected a whole number"),
        (lambda: distmega.EngineOptions(batch=1.5), "^batch 1.5; expected a whole number"),
        (lambda: distmega.EngineOptions(collectives="nccl"), "'nccl'; expected one of auto, kern"),
        (lambda: distmega.EngineOptions(events="all"), "'all'; expected one of overlap, op"),
        (lambda: distmega.EngineOptions(num_sms=10**6), "^num_sms 1000000; expected at most 1024"),
        (lambda: distmega.EngineOptions(batch=10**11), "^batch 100000000000; expected at most"),
        (lambda: distmega.EngineOptions(batch=True), "^batch True; expected a whole number"),
        (
            lambda: distmega.EngineOptions(timeout_s=1e300),
            r"^timeout_s 1e\+300; expected",
        ),
        (lambda: distmega.EngineOptions(timeout_s=None), "^timeout_s None; expected more than 0"),
        (lambda: distmega.EngineOptions(timeout_s=math.nan), "^timeout_s nan; expected more than"),
        (lambda: request(tp=10**6), "^tp 1000000; expected at most 1024"),
        (lambda: request(pp=10**5000), "^pp of 16610 bits; expected at most 1024"),
        (lambda: request(prompts=None), "prompts None; expected texts in a tuple"),
        (lambda: request(model=None), "model None; expected a name or path as text"),
        (lambda: request(options=None), "options None; expected EngineOptions"),
        (lambda: distmega.generate("hi"), "'hi' in place of a request; expected a GenerateReq"),
        (
            lambda: distmega.generate(request(), LauncherOptions(device="cpu"), 5),
            "^on_token 5; expected a function; give one, or leave it out",
        ),
        (
            lambda: opened(distmega.open_model("tiny-llama"), progress=5),
            "^progress 5; expected a fun",
        ),
        (
            lambda: opened(distmega.open_model("tiny-llama"), tell="x"),
            "^tell 'x'; expected a function",
        ),
        (lambda: opened("tiny-llama"), "'tiny-llama' in place of an open model; .*open_model ret"),
        (lambda: opened(distmega.open_model("tiny-llama"), {}), "options {}; expected EngineOpt"),
    ],
)
def test_a_value_of_a_wrong_type_is_refused_at_once(make, message: str):
    with pytest.raises(RequestError, match=message):
        make()


def opened(
    source: object, options: object = distmega.EngineOptions(), **others: object
) -> distmega.Engine:
    return distmega.open_engine(CPU_RANK, source, 1, options, **others)


def request(**changes: object) -> distmega.GenerateRequest:
    return distmega.GenerateRequest(**{"model": "tiny-llama", "prompts": ("a",), **changes})


def test_an_engine_names_what_it_can_not_do(monkeypatch):
    source = distmega.open_model("tiny-llama")
    engine = distmega.open_engine(CPU_RANK, source, 1, distmega.EngineOptions(max_context=8))
    for call, message in (
        (lambda: engine.generate([source.config.vocab]), "token 288; expected tokens of 0 to 287"),
        (lambda: engine.generate([-1]), "token -1; expected tokens of 0 to 287"),
        (lambda: engine.generate([1], -1), "^limit -1; expected at least 0"),
        (lambda: engine.generate_all([]), "no prompt; expected at least one"),
    ):
        with pytest.raises(RequestError, match=message):
            next(call())
    refusal = RuntimeError("can't allocate memory")
    monkeypatch.setattr("torch.zeros", lambda *given, **named: raised(refusal))
    with pytest.raises(RequestError, match=r"0\.0 GB for the weight arena .* memory for it on cpu"):
        distmega.open_engine(CPU_RANK, source, 1, distmega.EngineOptions(max_context=8))


def raised(error: Exception) -> None:
    raise error


def test_the_command_logs_from_the_level_asked_for(monkeypatch):
    told = {}
    monkeypatch.setenv("DISTMEGA_LOG", "debug")
    monkeypatch.setattr("logging.basicConfig", lambda **given: told.update(given))
    monkeypatch.setattr("distmega.cli.starting.launch", lambda *given: iter(()))
    assert main(["generate", "tiny-llama", "hi"]) == 0
    assert told["level"] == "DEBUG"
