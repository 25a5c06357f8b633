"""Plans on disk: what is made once, what anew, and that what is read equals what was made."""

import importlib.util
import logging
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from distmega.compiled import lowering
from distmega.engine import kept_plans
from distmega.engine.decode_plan import DecodePlan
from distmega.engine.decode_planner import lower_decode, plan_decode, planned_of
from distmega.engine.kept_plans import NOTHING_KEPT, KeptPlans
from distmega.engine.prefill import Prefills
from distmega.engine.prefill_planner import lower_prefill
from distmega.engine.requests import EngineOptions
from distmega.errors import CheckError
from distmega.hostir.check.check import prove_once
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.kernels import whole
from distmega.kernels.hopper.plan.encoded import encode_queues
from distmega.kernels.hopper.plan.types import RowQueues
from distmega.kernels.hopper.queues import Queues
from distmega.kernels.hopper.row_plan.queues import build_queues
from distmega.kernels.machines import H200
from distmega.kernels.runners import fold, unfold
from distmega.kernels.whole import WholePlan
from distmega.models.config import ModelConfig
from distmega.program.builder import ProgramBuilder
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.localize import localize
from distmega.sharding.planner import plan_program
from distmega.superopt.rules import RewriteRule, shipped_rules
from distmega.whole_file import replace_file
from tests.repo.test_layering import is_not_at_start

ALONE = DeviceMesh(tp=1)
CONFIG = ModelConfig(
    architecture="llama", hidden=256, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64,
    ffn=512, vocab=512, max_positions=512,
)  # fmt: skip


class Made:
    """Counts what it makes."""

    def __init__(self, value: object) -> None:
        self.value, self.num = value, 0

    def __call__(self) -> object:
        self.num += 1
        return self.value


def process(*key: object, folder: Path) -> Callable[[str, object, Callable[[], object]], object]:
    """What gets a value in a process of its own, which writes what was new."""
    kept = KeptPlans(*key, folder=folder)

    def get(name: str, more: object, make: Callable[[], object]) -> object:
        found = kept.get(name, more, make)
        kept.write()
        return found

    return get


@pytest.fixture(scope="module")
def decode_plan() -> DecodePlan:
    options = EngineOptions(max_context=512)
    staged = plan_decode(CONFIG, ALONE, H200, options)
    return lower_decode(CONFIG, staged, options, peer_memory=True)


def test_the_next_process_reads_what_the_first_made(tmp_path: Path):
    made = Made((1, "two"))
    for _ in range(2):
        assert process(CONFIG, folder=tmp_path)("plan", True, made) == (1, "two")
    assert made.num == 1


def test_each_part_of_a_key_tells_values_apart(tmp_path: Path):
    made = Made(0)
    for config in (CONFIG, replace(CONFIG, rope_base=5.0)):
        for more in (True, 1, "1", (1,), {"1": 1}):
            for name in ("plan", "queues"):
                process(config, folder=tmp_path)(name, more, made)
    assert made.num == 20


def test_other_files_or_versions_are_another_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = Made(0)
    for versions in ("one", "two", "one"):
        monkeypatch.setattr(kept_plans, "_versions", lambda now=versions: now)
        process(CONFIG, folder=tmp_path)("plan", (), made)
    assert made.num == 2


def test_a_file_of_distmega_that_changed_is_seen(tmp_path: Path):
    file = tmp_path / "folder" / "module.py"
    file.parent.mkdir()
    states = set()
    for text in ("a = 1", "a = 10"):
        file.write_text(text)
        states.add(tuple(kept_plans._files_below(tmp_path)))
    assert len(states) == 2


def test_what_editors_and_installers_leave_is_no_file_of_distmega(tmp_path: Path):
    (tmp_path / "module.py").write_text("a = 1")
    before = [*kept_plans._files_below(tmp_path)]
    (tmp_path / ".#module.py").symlink_to("user@host.1234:5678")  # Emacs locks a file so
    (tmp_path / "moved.py").symlink_to("away.py")
    assert [*kept_plans._files_below(tmp_path)] == before


DAMAGES = ["nothing in it", "half of it", "another number", "open to others", "no folder"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_cannot_be_trusted_is_made_anew(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    made, folder = Made([*range(1000)]), tmp_path / "plans"
    if damage == "no folder":
        folder.write_text("a file")
    else:
        process(CONFIG, folder=folder)("plan", (), made)
        (path,) = folder.iterdir()
        assert path.stat().st_mode & 0o777 == 0o600
        if damage == "open to others":
            path.chmod(0o666)
        elif damage == "another number":
            data = path.read_bytes()
            changed = data.replace((999).to_bytes(2, "little"), (998).to_bytes(2, "little"))
            assert changed != data
            path.write_bytes(changed)
        else:
            path.write_bytes(path.read_bytes()[: 500 if damage == "half of it" else 0])
    before = made.num
    with caplog.at_level(logging.WARNING):
        assert process(CONFIG, folder=folder)("plan", (), made) == made.value
    assert made.num == before + 1
    assert caplog.records


def test_a_key_without_a_text_keeps_nothing(tmp_path: Path):
    made = Made(0)
    for _ in range(2):
        process(torch.nn.Linear(1, 1), folder=tmp_path)("plan", (), made)
        process(CONFIG, folder=tmp_path)("plan", (torch.nn.Linear(1, 1),), made)
        NOTHING_KEPT.get("plan", (), made)
    assert made.num == 6
    assert not [*tmp_path.iterdir()]


def test_the_oldest_files_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kept_plans, "MOST_FILES", 3)
    for number in range(5):
        process(folder=tmp_path)("plan", number, Made(number))
    assert len([*tmp_path.iterdir()]) == 3


def test_what_a_killed_process_left_is_removed(tmp_path: Path):
    """Ranks are killed where one of them fails, or at Ctrl-C, whatever they write."""
    write = f"""
import os, pathlib, signal
from distmega.whole_file import replace_file
with replace_file(pathlib.Path({str(tmp_path / "plan-0.pickle")!r})) as file:
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", write], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    os.utime(left, (0, 0))
    with replace_file(tmp_path / "plan-2.pickle"):
        process(folder=tmp_path)("plan", 1, Made(1))
    assert not left.exists()
    assert len([*tmp_path.glob("plan-*.pickle")]) == 2, "what others are writing stays"


def test_a_decode_plan_is_read_as_it_was_made(decode_plan: DecodePlan, tmp_path: Path):
    made = Made(decode_plan)
    for _ in range(2):
        assert process(CONFIG, folder=tmp_path)("decode", (), made) == decode_plan
    assert made.num == 1


def test_a_decode_step_is_proven_as_it_is_planned(
    decode_plan: DecodePlan, monkeypatch: pytest.MonkeyPatch
):
    """What is read later is not proven again."""

    def refuse(host: object) -> None:
        raise CheckError("a race", expected="none", remedy="wait")

    monkeypatch.setattr("distmega.hostir.check.check._prove", refuse)
    prove_once.cache_clear()
    with pytest.raises(CheckError, match="a race"):
        lower_decode(CONFIG, planned_of(decode_plan).staged, decode_plan.options, peer_memory=True)
    prove_once.cache_clear()


def test_what_a_decode_plan_was_made_from_is_read_when_it_is_asked_for(
    decode_plan: DecodePlan, monkeypatch: pytest.MonkeyPatch
):
    read: list[int] = []
    load = pickle.loads

    def loads(data: bytes) -> object:
        read.append(len(data))
        return load(data)

    kept = pickle.dumps(decode_plan)
    monkeypatch.setattr(pickle, "loads", loads)
    found: DecodePlan = load(kept)
    assert len(kept) > len(pickle.dumps(found.host))
    assert (found.host, found.fingerprint) == (decode_plan.host, decode_plan.fingerprint)
    again: DecodePlan = load(pickle.dumps(found))
    assert not read
    for each in (found, again):
        assert planned_of(each) == planned_of(decode_plan)
        assert planned_of(each) is planned_of(each)
    assert len(read) == 2


STARTED = """
import pickle, sys, torch
import distmega.engine.ranks.jobs
from distmega.kernels import late
from distmega.kernels.runners import unfold
plan, queues, prompt = (pickle.loads(data) for data in pickle.loads(sys.stdin.buffer.read()))
assert unfold(queues, None).stages
if len(sys.argv) > 1:
    late.RowRunner
print("\\n".join(name for name in sys.modules if name.startswith("distmega")))
"""
"""What a process does that finds all on disk, until a GPU is needed."""


def test_what_is_read_is_read_without_what_plans(decode_plan: DecodePlan):
    """Each module is a file to read, of which some hosts read one in 2 ms."""
    arenas = decode_plan.weights, decode_plan.states
    queues = fold(build_queues(decode_plan.host.segments[0], *arenas, 8, 0, "op"))
    values = decode_plan, queues, lower_prefill(decode_plan, 128, "none")
    given = pickle.dumps([*map(pickle.dumps, values)])
    has_triton = importlib.util.find_spec("triton") is not None
    done = subprocess.run(
        [sys.executable, "-c", STARTED, *(["with triton"] if has_triton else [])],
        input=given,
        capture_output=True,
        check=True,
    )
    loaded = set(done.stdout.decode().split())
    assert "distmega.engine.engine" in loaded
    assert not [name for name in loaded if is_not_at_start(name)]
    assert len(loaded) < (240 if has_triton else 200)


def test_queues_are_read_without_their_instructions(decode_plan: DecodePlan, tmp_path: Path):
    plans: list[RowQueues] = []

    def plan() -> RowQueues:
        arenas = decode_plan.weights, decode_plan.states
        plans.append(build_queues(decode_plan.host.segments[0], *arenas, 8, 0, "op"))
        return plans[-1]

    def kept_queues() -> RowQueues:
        kept = KeptPlans(CONFIG, folder=tmp_path)
        found: Queues = kept.get_folded("queues", (), plan, fold, unfold)
        kept.write()
        assert isinstance(found, RowQueues)
        return found

    first = kept_queues()
    assert tuple(first.queues) == plans[0].queues
    assert len(plans) == 1, "the process that planned has its instructions"
    found = kept_queues()
    before, after = encode_queues(plans[0]), encode_queues(found)
    assert (before.words == after.words).all()
    assert before.words.any()
    assert before.lengths.tolist() == after.lengths.tolist() == [*map(len, plans[0].queues)]
    assert after.has_barriers
    assert len(found.queues) == 8
    assert len(plans) == 1, "nothing was planned again"
    assert tuple(found.queues) == plans[0].queues
    assert len(plans) == 2
    assert replace(found, queues=()) == replace(plans[0], queues=())


@pytest.mark.parametrize("rows", [1, 4])
def test_the_kernel_of_a_program_is_planned_by_the_first_process(
    rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    planned = Made(None)

    def plan_whole(*given: Any, **named: Any) -> WholePlan:
        planned()
        return whole.plan_whole(*given, **named)

    monkeypatch.setattr("distmega.kernels.runners.require_hopper", lambda device: 8)
    monkeypatch.setattr(lowering, "facts_of", lambda device: ("a Hopper GPU", 8))
    monkeypatch.setattr(lowering, "plan_whole", plan_whole)
    monkeypatch.setattr(kept_plans, "FOLDER", tmp_path)

    def kernel_of(formula: str, rules: Sequence[RewriteRule] = shipped_rules()) -> WholePlan:
        p = ProgramBuilder("gated")
        x = p.input("x", (rows, 64), "bf16")
        h = p.linear(x, p.weight("up", (128, 64), "bf16")).map(formula)
        program = p.build(p.linear(h, p.weight("down", (64, 128), "bf16")))
        local = localize(plan_program(program, ALONE, H200))
        comm, device = SingleCommunicator(ALONE), torch.device("cuda", 0)
        return lowering.plan_kept_kernel(local, comm, device, rules, forced=True)

    first, again = (kernel_of("tanh(a0)") for _ in range(2))
    assert planned.num == 1
    assert replace(again, queues=None) == replace(first, queues=None)
    assert first.queues
    assert again.queues
    assert first.num_tasks == sum(map(len, first.queues.queues)) > 2
    assert again.queues.num_events == first.num_events
    if rows > 1:
        assert again == first
    kernel_of("exp(a0)")
    kernel_of("tanh(a0)", rules=())
    assert planned.num == 3


def test_a_prompt_program_serves_prompts_of_other_sizes(
    decode_plan: DecodePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    lowered: list[int] = []

    def lower(plan: DecodePlan, size: int, logits: str) -> object:
        lowered.append(size)
        return lower_prefill(plan, size, logits)

    monkeypatch.setattr("distmega.engine.late.lower_prefill", lower)
    for size in (128, 64, 128, 448):
        kept, comm = KeptPlans(CONFIG, folder=tmp_path), SingleCommunicator(ALONE)
        prefills = Prefills(decode_plan, Mock(), comm, torch.device("cuda"), kept)
        host, proven = prefills._host_program(size, "none")
        assert host == lower_prefill(decode_plan, size, "none")
        assert proven
        kept.write()
    assert lowered == [128]


def test_nothing_is_written_until_there_is_time(tmp_path: Path):
    kept = KeptPlans(CONFIG, folder=tmp_path)
    kept.get("plan", (), Made(1))
    assert not [*tmp_path.iterdir()]
    for _ in range(2):
        kept.write()
    assert len([*tmp_path.iterdir()]) == 1


def nested(depth: int) -> object:
    value: object = ()
    for _ in range(depth):
        value = (value,)
    return value


@pytest.mark.parametrize("value", [lambda: None, nested(10_000)], ids=["a function", "a deep one"])
def test_a_value_that_cannot_be_written_is_made_each_time(value: object, tmp_path: Path):
    made = Made(value)
    for key in ((), (), nested(10_000)):
        assert process(CONFIG, folder=tmp_path)("plan", key, made) is made.value
    assert made.num == 3
    assert not [*tmp_path.iterdir()]
