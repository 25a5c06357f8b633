"""Tables of records, whatever these have."""

from pathlib import Path

from bench import tables
from bench.records import Record, write_records


def test_a_case_that_was_measured_alone_has_a_row_without_a_peer(tmp_path: Path) -> None:
    """As --no-peer writes it."""
    what, benchmark, case = tables.SUMMARY[0]
    record = Record(
        case=case, device="NVIDIA H200", num_gpus=1, ours_us=616.0, peers={}, floor_us=None
    )
    write_records(tmp_path / f"{benchmark}-{tables.DEVICE}.json", [record])
    assert tables.summary(tmp_path).splitlines()[2:] == [f"| {what} | 1 | 616 | - | - |"]
