"""--at-once of benchmarks: cases are set up together and timed one after the other."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from bench.cases import Job, measure_in_turn
from bench.prefill import Case, parse_case
from bench.records import Book, Record, read_records, result_name
from bench.turns import Turns
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.sharding.layout.mesh import DeviceMesh

CASES = tuple(parse_case(f"qwen3-8b prompt={n} batch=1") for n in (8, 16, 32))


def test_records_are_written_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Threads in place of processes, which wait for each other's set-up."""
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    set_up, together = list[str](), threading.Barrier(len(CASES))

    def measured(case: Case, comm: object, rounds: int, with_peer: bool, ready: object) -> Record:
        assert (rounds, with_peer) == (7, False)
        set_up.append(case.text)
        together.wait()
        assert callable(ready)
        ready()
        assert len(set_up) == len(CASES)
        device = "NVIDIA H200"
        return Record(
            case=case.text, device=device, num_gpus=1, ours_us=2.0, peers={}, floor_us=1.0
        )

    book, store = Book(folder=tmp_path, commit="abc"), str(tmp_path / "turns")

    def work(number: int) -> None:
        turns = Turns(store=store, number=number, num=len(CASES))
        job = Job(
            benchmark="prefill",
            case=CASES[number],
            measure=measured,
            rounds=7,
            with_peer=False,
            book=book,
            turns=turns,
        )
        measure_in_turn(SingleCommunicator(DeviceMesh(tp=1)), job)

    with ThreadPoolExecutor(len(CASES)) as pool:
        list(pool.map(work, range(len(CASES))))
    found = read_records(tmp_path / f"{result_name('prefill', 'NVIDIA H200')}.json")
    assert [record.case for record in found] == [case.text for case in CASES]
