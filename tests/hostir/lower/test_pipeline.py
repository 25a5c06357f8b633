"""Stages of a pipeline: what they send each other, in text and as results, on threads for ranks."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
import torch

from distmega.errors import CheckError
from distmega.hostir.check.check import check_host
from distmega.hostir.ir.nodes import (
    ForLoop,
    HostProgram,
    Node,
    Recv,
    Send,
    Signal,
    Wait,
    WaitSignal,
    walk_nodes,
)
from distmega.hostir.ir.text import parse_host, print_host
from distmega.hostir.lower.lower import lower_program
from distmega.hostir.lower.pipeline import IN_FLIGHT, StagePart, link_stage
from distmega.hostir.passes.passes import run_passes
from distmega.hostir.run.evaluator import Evaluator
from distmega.kernels.machines import CPU
from distmega.models.config import ModelConfig
from distmega.models.decoder import build_decoder
from distmega.models.presets import PRESETS
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.localize import LocalProgram, localize
from distmega.sharding.planner import plan_program
from distmega.sharding.stages import cut_positions, split_stages
from tests.hostir.programs import SegmentRunner, run_program, shard_tensors
from tests.hostir.threads import ThreadCommunicator, Wires

CONTEXT = 24
CONFIG: ModelConfig = PRESETS["tiny-llama"]

ORDERS = Wait | Signal | WaitSignal | Send | Recv
"""Nodes that stages are ordered by."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Host programs and allocations by stage."""

    mesh: DeviceMesh
    hosts: Sequence[HostProgram]
    locals: Sequence[LocalProgram]

    def check(self) -> None:
        check_host(self.by_rank(self.hosts))

    def by_rank(self, hosts: Sequence[HostProgram]) -> list[HostProgram]:
        return [hosts[self.mesh.coordinate(rank)["pp"]] for rank in self.mesh.ranks]


def decoder(num_tokens: int, logits: str = "none") -> Program:
    return build_decoder(CONFIG, num_tokens, CONTEXT, logits=logits)


def pipeline(
    sizes: Sequence[int],
    *,
    pp: int = 2,
    tp: int = 1,
    logits: str = "none",
    megakernel: bool = False,
) -> Pipeline:
    """A decoder whose micro-batches have these sizes, equal ones but for the last."""
    mesh = DeviceMesh(pp=pp, tp=tp)
    cuts = cut_positions(decoder(1), pp)
    hosts, found = [], []
    for index in range(pp):
        parts = []
        for size in dict.fromkeys(sizes):
            stage = split_stages(decoder(size, logits), cuts)[index]
            local = localize(plan_program(stage.program, mesh.part("pp", index), CPU))
            host = lower_program(
                replace(local, mesh=mesh), megakernel=megakernel, peer_memory=megakernel
            )
            parts.append(StagePart(stage=stage, host=host, count=list(sizes).count(size)))
        rows = {"tokens": 0, "positions": 0} | ({"logits": 0} if logits == "all" else {})
        hosts.append(run_passes(link_stage(parts, rows)))
        found.append(replace(local, mesh=mesh))
    return Pipeline(mesh=mesh, hosts=hosts, locals=found)


def random_weights(program: Program) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    tensors = {
        t.name: torch.randn(t.shape, generator=generator) / t.shape[-1] ** 0.5
        for t in program.tensors
        if t.role in ("weight", "state")
    }
    num_tokens = program.tensor_map()["tokens"].shape[0]
    tokens = torch.randint(CONFIG.vocab, (num_tokens,), generator=generator)
    return {**tensors, "tokens": tokens, "positions": torch.arange(num_tokens)}


def run_pipeline(made: Pipeline, tensors: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Outputs of each rank."""
    wires = Wires(made.mesh)

    def run(rank: int) -> dict[str, torch.Tensor]:
        at = made.mesh.coordinate(rank)
        host, local = made.hosts[at["pp"]], made.locals[at["pp"]]
        names = {buffer.name for buffer in host.buffers if buffer.role in ("weight", "state")}
        given = shard_tensors({n: t for n, t in tensors.items() if n in names}, local, rank)
        inputs = {name: tensors[name] for name in ("tokens", "positions")}
        runners = {segment.name: SegmentRunner(segment, at) for segment in host.segments}
        comm = ThreadCommunicator(made.mesh, rank, wires)
        return Evaluator(host, comm, runners).run(given | inputs)

    with ThreadPoolExecutor(made.mesh.num_ranks) as pool:
        return list(pool.map(run, made.mesh.ranks))


def lines(host: HostProgram) -> list[str]:
    """The printed body, less the stage's own ops, allocations and frees."""
    words = ("for", "slice", "wait", "signal", "send", "recv", "launch", "coalesce", "end")
    _, _, body = print_host(host).partition("\n  body\n")
    return [line[4:] for line in body.splitlines()[:-1] if line.split()[0] in words]


def test_a_decode_step_passes_from_stage_to_stage() -> None:
    made = pipeline([1], megakernel=True)
    first, last = made.hosts
    assert first.buffer_map()["next"].role == "temp"
    assert [line.partition("(")[0] for line in lines(first)] == [
        "launch decoder_1.stage0.0",
        "coalesce",
        "send layers.0.ffn_sum to pp[1]",
        "recv next from pp[1]",
        "end coalesce as layers.0.ffn_sum.to1",
        "wait layers.0.ffn_sum.to1",
    ]
    assert [line.partition("(")[0] for line in lines(last)] == [
        "recv layers.0.ffn_sum from pp[0] as layers.0.ffn_sum.recv",
        "wait layers.0.ffn_sum.recv",
        "launch decoder_1.stage1.0",
        "send next to pp[0] as next.to0",
        "wait next.to0",
    ]


def test_micro_batches_are_a_loop_with_a_bound_on_those_under_way() -> None:
    first, last = pipeline([3, 3, 3, 2]).hosts
    assert lines(first) == [
        "for chunk in 3:",
        "  slice tokens#0 of tokens dim 0 by chunk step 3",
        "  slice positions#0 of positions dim 0 by chunk step 3",
        "  wait signal free from pp[1]",
        "  send layers.0.ffn_sum to pp[1] as layers.0.ffn_sum.to1",
        "  wait layers.0.ffn_sum.to1",
        "slice tokens#1 of tokens dim 0 by 0 + 3 step 3",
        "slice positions#1 of positions dim 0 by 0 + 3 step 3",
        "wait signal free from pp[1]",
        "send layers.0.ffn_sum#1 to pp[1] as layers.0.ffn_sum#1.to1",
        "wait signal free from pp[1]",
        "wait signal free from pp[1]",
        "recv next from pp[1] as next.recv",
        "wait layers.0.ffn_sum#1.to1",
        "wait next.recv",
    ]
    assert lines(last)[:IN_FLIGHT] == ["signal free to pp[0]"] * IN_FLIGHT
    assert lines(last).count("  signal free to pp[0]") == 1


@pytest.mark.parametrize("sizes", [[1], [5], [3, 3], [3, 3, 2], [1] * 6])
@pytest.mark.parametrize(("pp", "tp"), [(2, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize("logits", ["none", "all"])
def test_results_are_those_of_the_whole_program(
    sizes: list[int], pp: int, tp: int, logits: str
) -> None:
    made = pipeline(sizes, pp=pp, tp=tp, logits=logits)
    made.check()
    assert all(parse_host(print_host(host)) == host for host in made.hosts)
    whole = decoder(sum(sizes), logits)
    tensors = random_weights(whole)
    expected = run_program(whole, {name: x.clone() for name, x in tensors.items()})
    for outputs in run_pipeline(made, tensors):
        assert list(outputs) == list(whole.outputs)
        assert torch.equal(outputs["next"], expected["next"])
        if logits == "all":
            torch.testing.assert_close(outputs["logits"], expected["logits"])


def test_the_same_stage_runs_as_a_megakernel() -> None:
    made = pipeline([1], pp=2, tp=1, megakernel=True)
    made.check()
    whole = decoder(1)
    tensors = random_weights(whole)
    expected = run_program(whole, {name: x.clone() for name, x in tensors.items()})
    for outputs in run_pipeline(made, tensors):
        assert torch.equal(outputs["next"], expected["next"])


def test_one_stage_with_micro_batches() -> None:
    made = pipeline([4, 4, 1], pp=1)
    made.check()
    whole = decoder(9)
    tensors = random_weights(whole)
    expected = run_program(whole, {name: x.clone() for name, x in tensors.items()})
    (outputs,) = run_pipeline(made, tensors)
    assert torch.equal(outputs["next"], expected["next"])


def without(host: HostProgram, number: int) -> HostProgram:
    """The program less the node of that number in printed order."""
    count = -1

    def visit(body: Sequence[Node]) -> tuple[Node, ...]:
        nonlocal count
        kept: list[Node] = []
        for node in body:
            count += 1
            here = count
            inner = replace(node, body=visit(node.body)) if isinstance(node, ForLoop) else node
            if here != number:
                kept.append(inner)
        return tuple(kept)

    return replace(host, body=visit(host.body))


@pytest.mark.parametrize("pp", [2, 3])
def test_no_transfer_signal_or_wait_can_go(pp: int) -> None:
    made = pipeline([2, 2, 1], pp=pp)
    made.check()
    num_tried = 0
    for stage, host in enumerate(made.hosts):
        for number, node in enumerate(walk_nodes(host.body)):
            if isinstance(node, ORDERS):
                hosts = [*made.hosts]
                hosts[stage] = without(host, number)
                with pytest.raises(CheckError):
                    check_host(made.by_rank(hosts))
                num_tried += 1
    assert num_tried >= 20


def test_waiting_for_a_signal_that_comes_after_what_it_lets_go_is_a_cycle() -> None:
    """The receiver may not ask for a micro-batch before it has said that there is room."""
    made = pipeline([2, 2, 2])
    first, last = made.hosts
    early = tuple(node for node in last.body if not isinstance(node, Signal))
    late = tuple(node for node in last.body if isinstance(node, Signal))
    with pytest.raises(CheckError, match=r"these wait for each other: .*signal free"):
        check_host(made.by_rank([first, replace(last, body=(*early, *late))]))
