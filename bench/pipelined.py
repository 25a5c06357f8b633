"""Pipelined pointwise and norm kernels beside the same kernel with one stage, torch eager and
torch.compile, alternating in one run: `python -m bench.pipelined`, on a GPU of compute capability
9.0.

Writes bench/results/pipelined-<device>.json, a record a case (records.py); floor_us is the case's
bytes at the rate of a copy of one of its tensors in the same run. Inputs are out of the cache. With
--host also pipelined-host-<device>.json.
"""

import argparse
import dataclasses
import logging
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.options import at_least, read_options
from bench.records import Record, add_book_options, open_book
from bench.timing import Call, alternating_us
from distmega import kernels
from distmega.kernels.pipelined.choices import Traffic, fits
from distmega.kernels.pipelined.families import Launch, LaunchFamily
from distmega.kernels.pipelined.norms import norms
from distmega.kernels.pipelined.pointwise import pointwise
from distmega.kernels.pipelined.pointwise.exprs import formula_of
from distmega.kernels.pipelined.tuning import known_choice, tuning

MB = 2**20
FLUSH_BYTES = 512 * MB
"""Written before each timed call: more than the L2 holds, and time for the host to run ahead."""
Operands = Callable[[], Sequence[Tensor | None]]
"""The kernels' tensors, results among them new."""


def silu_mul(a: Tensor, b: Tensor) -> Tensor:
    return F.silu(a) * b


def four_in(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    return a * b + c * torch.sigmoid(d)


def rms_residual(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms(total, weight), total


def rms(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


def layer(x: Tensor, weight: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An op at one size. op: a pointwise expression, or rms, layer with or without residual."""

    name: str
    op: str
    peer: Callable[..., object]
    num_inputs: int
    num_outputs: int
    size_mb: int
    columns: int

    @property
    def moved_bytes(self) -> int:
        return (self.num_inputs + self.num_outputs) * self.size_mb * MB


def all_cases(sizes_mb: list[int]) -> list[Case]:
    """Pointwise does not depend on row lengths; norms do."""
    ops: list[tuple[str, str, Callable[..., object], int, int, tuple[int, ...]]] = [
        ("silu(a)*b", "silu(a0) * a1", silu_mul, 2, 1, (4096,)),
        ("4 in 1 out", "a0 * a1 + a2 * sigmoid(a3)", four_in, 4, 1, (4096,)),
        ("rms norm + residual", "rms_norm", rms_residual, 2, 2, (1024, 4096, 16384)),
        ("rms norm", "rms_norm", rms, 1, 1, (4096,)),
        ("layer norm", "layer_norm", layer, 1, 1, (4096,)),
    ]
    return [
        Case(
            name=name, op=op, peer=peer, num_inputs=ins, num_outputs=outs, size_mb=size,
            columns=columns,
        )
        for name, op, peer, ins, outs, lengths in ops
        for size in sizes_mb
        for columns in lengths
    ]  # fmt: skip


def calls_of(case: Case, data: list[Tensor]) -> dict[str, Call]:
    """The variants of a case over bf16 tensors of its size, compiled and tuned."""
    count = case.size_mb * MB // 2
    tensors = [x[:count].view(-1, case.columns) for x in data[: case.num_inputs]]
    weight = torch.randn(case.columns, device="cuda", dtype=torch.bfloat16)
    args = [*tensors] if case.op not in ("rms_norm", "layer_norm") else [*tensors, weight]
    torch._dynamo.reset()
    compiled = torch.compile(case.peer, dynamic=False)
    family, operands = _family(case, tensors, weight)
    family.run(operands())
    single = one_stage_of(family, case, operands)
    return {
        "ours": lambda: family.run(operands()),
        "one stage": lambda: single(operands()),
        "torch eager": lambda: case.peer(*args),
        "torch.compile": lambda: compiled(*args),
    }


def _family(case: Case, tensors: list[Tensor], weight: Tensor) -> tuple[LaunchFamily, Operands]:
    """The case's launches, and its operands with new results."""
    if case.op in ("rms_norm", "layer_norm"):
        residual = tensors[1] if len(tensors) == 2 else None

        def operands() -> Sequence[Tensor | None]:
            total = None if residual is None else torch.empty_like(residual)
            return tensors[0], residual, weight, None, torch.empty_like(tensors[0]), total

        found = norms.family_of(case.op, 1e-6, operands())  # type: ignore[arg-type]
    else:

        def operands() -> Sequence[Tensor | None]:
            return pointwise.inplace_inputs(tensors, [torch.empty_like(tensors[0])])

        formula = formula_of((case.op,))
        found = pointwise.family_of(formula, tensors, [torch.empty_like(tensors[0])])
    assert found is not None, "contiguous tensors have launches"
    return found, operands


def one_stage_of(family: LaunchFamily, case: Case, operands: Operands) -> Launch:
    """The chosen kernel without loads ahead (the model's best where that is no TMA kernel): with as
    many programs, or as fit; the faster of both.
    """
    chosen = known_choice(family.name, family.choices)
    if not chosen.stages:
        chosen = next(choice for choice in family.choices if choice.stages)
    traffic = Traffic(in_bytes=2 * case.num_inputs, out_bytes=2 * case.num_outputs, num_elements=1)
    single = dataclasses.replace(chosen, stages=1, buffers=1, run=0)
    dense = (dataclasses.replace(single, programs_per_sm=n) for n in range(8, 0, -1))
    options = [single, next(choice for choice in dense if fits(choice, traffic))]
    family.prepare(options, operands())
    launches = [family.launch(choice) for choice in dict.fromkeys(options)]
    times = median_us({str(n): lambda k=k: k(operands()) for n, k in enumerate(launches)}, 9)  # type: ignore[misc]
    return launches[int(min(times, key=times.__getitem__))]


_flush: list[Tensor] = []


def median_us(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Time on the GPU of each call, all of them in turn in every round, with inputs out of the
    cache.
    """
    if not _flush:
        _flush.append(torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda"))
    return alternating_us(calls, rounds, _flush[0].zero_)


def rounds(size_mb: int) -> int:
    """More for what is short."""
    return max(11, min(101, 8192 // size_mb))


def host_us(call: Call) -> float:
    """Time on the host of a call that the GPU keeps up with."""
    spans = []
    for _ in range(30):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            call()
        spans.append((time.perf_counter() - start) / 20 * 1e6)
    return sorted(spans)[len(spans) // 2]


def measure_host() -> list[Record]:
    """Time on the host of one call, through the functions that users call; the floor is that of one
    torch op.
    """
    a, b = (torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.randn(1024, device="cuda", dtype=torch.bfloat16)
    add = host_us(lambda: torch.add(a, b))
    cases: list[tuple[str, Call, Callable[..., object], list[Tensor]]] = [
        ("silu(a)*b", lambda: kernels.pointwise("silu(a0) * a1", a, b), silu_mul, [a, b]),
        ("rms norm + residual", lambda: kernels.rms_norm(a, weight, residual=b), rms_residual,
         [a, b, weight]),
        ("layer norm", lambda: kernels.layer_norm(a, weight), layer, [a, weight]),
    ]  # fmt: skip
    records = []
    for name, ours, peer, args in cases:
        torch._dynamo.reset()
        compiled = torch.compile(peer, dynamic=False)
        calls: dict[str, Call] = {
            "torch eager": lambda p=peer, x=args: p(*x),  # type: ignore[misc]
            "torch.compile": lambda p=compiled, x=args: p(*x),  # type: ignore[misc]
        }
        ours()
        compiled(*args)
        times = {peer_name: round(host_us(call), 2) for peer_name, call in calls.items()}
        found = host_us(ours)
        print(f"host time of {name}: {found:.1f} us, {times}, one torch op {add:.1f}", flush=True)
        records.append(_record(f"host time of {name}", found, times, add))
    return records


def _record(case: str, ours: float, peers: dict[str, float], floor: float) -> Record:
    return Record(
        case=case,
        device=torch.cuda.get_device_name(),
        num_gpus=1,
        ours_us=round(ours, 2),
        peers={name: round(us, 2) for name, us in peers.items()},
        floor_us=round(floor, 2),
    )


def measure(case: Case, data: list[Tensor]) -> Record:
    """One case, its copy included, in alternation."""
    calls = calls_of(case, data)
    count = case.size_mb * MB // 2
    calls["copy"] = lambda: data[-1][:count].copy_(data[0][:count])
    times = median_us(calls, rounds(case.size_mb))
    torch.cuda.empty_cache()
    rate = 2 * case.size_mb * MB / times.pop("copy")
    ours = times.pop("ours")
    floor = case.moved_bytes / rate
    tb = case.moved_bytes / 1e6
    rates = ", ".join(f"{name} {us:.1f} us {tb / us:.2f}" for name, us in times.items())
    title = f"{case.name} {case.size_mb} MB rows of {case.columns}"
    print(
        f"{title}: {ours:.1f} us {tb / ours:.2f} TB/s, {rates}, copy {rate / 1e6:.2f}", flush=True
    )
    return _record(title, ours, times, floor)


def main() -> None:
    """Measures all cases and writes the records."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--sizes-mb", type=at_least(1), nargs="+", default=[1, 4, 16, 64, 256, 1024, 4096]
    )
    parser.add_argument("--host", action="store_true", help="also the time on the host of a call")
    add_book_options(parser)
    options = read_options(parser)
    book = open_book(options.results, options.commit)
    logging.basicConfig(format="%(message)s")
    logging.getLogger(tuning.__module__).setLevel(logging.INFO)  # says which kernel is chosen
    largest = max(options.sizes_mb) * MB // 2
    data = [torch.randn(largest, device="cuda", dtype=torch.bfloat16) for _ in range(5)]
    for record in measure_host() if options.host else ():
        book.write("pipelined-host", record)
    worst = math.inf
    with tempfile.TemporaryDirectory() as folder, tuning(Path(folder) / "choices.json"):
        for case in all_cases(options.sizes_mb):
            record = measure(case, data)
            book.write("pipelined", record)
            worst = min(worst, record.peers["torch.compile"] / record.ours_us)
    print(f"least against torch.compile: {worst:.2f}")


if __name__ == "__main__":
    main()
