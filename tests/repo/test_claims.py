"""What the pages say of the results in words is what the result files give."""

import re

from bench.records import RESULTS, Record, read_records
from tests.repo.source import ROOT

LATENESS = 1.06
"""Of the floor, from FROM_ROWS on: the target for matmuls with a collective."""
FROM_ROWS = 4096


def words(page: str) -> str:
    return " ".join((ROOT / page).read_text().split())


TORCH, VLLM = "torch.compile", "vLLM 0.26"


def speedups(records: list[Record], *peers: str) -> list[float]:
    """Of each case the best of `peers`' time over ours, of all peers unless named; none for a case
    without them.
    """
    times = [
        (record, [us for name, us in record.peers.items() if name in peers or not peers])
        for record in records
    ]
    return [min(found) / record.ours_us for record, found in times if found]


def extent(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def overlap_cases(num_ranks: int) -> list[Record]:
    return read_records(RESULTS / f"overlap-nvidia-h200-tp{num_ranks}.json")


def late(records: list[Record]) -> list[float]:
    """Our time over the floor, of cases that miss the target."""
    wide = [r for r in records if int(re.findall(r"M=(\d+)", r.case)[0]) >= FROM_ROWS]
    times = [r.ours_us / r.floor_us for r in wide if r.floor_us]
    return [time for time in times if time > LATENESS]


def test_speedups_of_decode_steps():
    records = read_records(RESULTS / "decode-nvidia-h200.json")
    alone = [record for record in records if record.num_gpus == 1]
    one = [record for record in alone if " batch=1 " in record.case]
    many = [record for record in alone if " batch=16 " in record.case]
    graphs = [r for r in alone if " batch=32 " in r.case or " batch=64 " in r.case]
    two, four = ([record for record in records if record.num_gpus == num] for num in (2, 4))
    ones = [record for record in two if " batch=1 " in record.case]
    more = [record for record in two if record not in ones]
    four = speedups(four, TORCH)
    said = words("docs/performance.md")
    assert f"of one sequence is {extent(speedups(one, TORCH))} times as fast as torch.comp" in said
    assert f"of 16 sequences {extent(speedups(many, TORCH))} times, of 32 and 64" in said
    assert f"as one graph of library ops, {extent(speedups(graphs, TORCH))} times;" in said
    assert f"at tp 2 one is {extent(speedups(ones, TORCH))} times as fast as torch.comp" in said
    assert f"those of 32 and 64 sequences {extent(speedups(more, TORCH))} times," in said
    assert f"with NCCL, at tp 4 {extent(four)} times" in said


def test_speedups_of_prompts():
    records = read_records(RESULTS / "prefill-nvidia-h200.json")
    alone = speedups([record for record in records if record.num_gpus == 1], TORCH)
    two = speedups([record for record in records if record.num_gpus == 2], TORCH)
    said = words("docs/performance.md")
    assert f"{extent(alone)} times as fast as torch.compile" in said
    assert f"{extent(two)} times as fast as torch.compile with NCCL" in said


def test_speedups_over_vllm():
    first = read_records(RESULTS / "prefill-nvidia-h200.json")
    records = read_records(RESULTS / "decode-nvidia-h200.json")
    tokens = [record for record in records if "a3b" not in record.case]
    experts = [
        " and ".join(f"{ratio:.2f}" for ratio in speedups(found, VLLM)).replace(" and", ",", 1)
        for found in (
            [record for record in of_all if "a3b prompt=448" in record.case]
            for of_all in (records, first)
        )
    ]
    first = [record for record in first if "a3b" not in record.case]
    one = [record for record in first if record.case.replace(" tp=2", "").endswith("batch=1")]
    many = [record for record in first if " batch=16" in record.case]
    assert len(speedups(tokens, VLLM)) == len(speedups([*one, *many], VLLM)) == 12
    said = words("docs/performance.md")
    assert f"Beside {VLLM} tokens come {extent(speedups(tokens, VLLM))} times as fast" in said
    assert f"tokens of 1, 8 and 16 sequences of Qwen3-30B-A3B {experts[0]} times" in said
    assert f"their first tokens {experts[1]} times" in said
    assert f"first token of one prompt {extent(speedups(one, VLLM))} times" in said
    assert f"of 16 prompts {extent(speedups(many, VLLM))} times" in said
    behind = [ratio for ratio in speedups(first, VLLM) if ratio < 1]
    assert f"vLLM's first token is sooner in {len(behind)} of 12 cases" in said


def test_times_of_a_program_that_is_no_decoder():
    records = read_records(RESULTS / "programs-nvidia-h200.json")
    one, two = [record for record in records if record.case.startswith("gated_mlp rows=1 ")
                or record.case == "gated_mlp rows=1"]  # fmt: skip
    ours, torch = ([f"{us:.0f}" for us in times] for times in (
        (one.ours_us, two.ours_us), (one.peers["torch graph"], two.peers["torch graph"]),
    ))  # fmt: skip
    said = words("docs/performance.md")
    assert f"one row takes {ours[0]} us on one H200 and {ours[1]} on two" in said
    assert f"where torch's own CUDA graph takes {torch[0]} and {torch[1]}" in said


def test_speedups_of_blocks():
    found = {record.case.split()[0]: speedups([record])[0] for record in overlap_cases(2)
             if f"M={FROM_ROWS} hidden" in record.case}  # fmt: skip
    mlp, transformer = f"{found['mlp']:.2f}", f"{found['transformer']:.2f}"
    said = words("docs/performance.md")
    assert f"{FROM_ROWS} rows {mlp} and {transformer} times as fast as the best of" in said


def test_targets_that_are_missed_are_told():
    said = words("docs/performance.md")
    two, four = overlap_cases(2), overlap_cases(4)
    slower = [ratio for ratio in speedups(two) if ratio < 1]
    assert not late(two)
    assert f"a peer is faster in {len(slower)} case of {len(two)}, by 1%" in said
    assert min(slower) > 0.985
    slower = [ratio for ratio in speedups(four) if ratio < 1]
    assert f"At four ranks {len(late(four))} cases miss the first" in said
    assert f"faster in {len(slower)} cases of {len(four)}" in said
    assert f"512 rows and fewer, by at most {100 * (1 - min(slower)):.0f}%" in said
    rows = [int(r.case.split()[1].removeprefix("M=")) for r in four if speedups([r])[0] < 1]
    assert max(rows) <= 512
    misses = [record for record in four if late([record])]
    reduces = late([record for record in misses if "gemm_ar" in record.case])
    assert f"the {len(reduces)} all-reduces ({extent(reduces)})" in said
    for record in misses:
        assert "gemm_ar" in record.case or f"{late([record])[0]:.2f}" in said


def test_all_reduces_that_torch_does_faster_are_told():
    four = read_records(RESULTS / "collectives-nvidia-h200-tp4.json")
    behind = [r.case for r in four if speedups([r])[0] < 1]
    assert behind == ["all-reduce 512 KB", "all-reduce 1024 KB"]
    assert "torch's two-shot is faster from 512 KB on" in words("bench/results/README.md")
    two = read_records(RESULTS / "collectives-nvidia-h200-tp2.json")
    assert min(speedups(two)) > 1


def test_graphs_of_the_superoptimizer_beside_torch_compile():
    records = read_records(RESULTS / "superopt-nvidia-h200.json")
    rows = [record.case.rpartition(" ")[2] for record in records]
    assert rows == ["rows=1"] * 6 + ["rows=16"] * 6
    several, records = speedups(records[6:], TORCH), records[:6]
    ratios, said = speedups(records, TORCH), words("bench/results/README.md")
    first = sum(ratio >= 1 for ratio in several)
    assert f"With 16 rows {first} of {len(several)} are, {extent(several)} times" in said
    assert f"{sum(ratio >= 1 for ratio in ratios)} of {len(ratios)} are at least as fast as" in said
    assert f"torch.compile max-autotune, {extent(ratios)} times" in said
    assert f"{sum(ratio >= 1.5 for ratio in ratios)} are so 1.5 times" in said
    found = {record.case.split()[0]: record for record in records}
    gated, norm = found["gated_mlp"], found["rmsnorm_linear"]
    assert gated.floor_us
    assert norm.floor_us
    assert f"floor alone is {gated.floor_us / gated.peers[TORCH]:.2f} of its time" in said
    assert f"would need {150 * norm.floor_us / norm.peers[TORCH]:.0f}% of the floor's" in said


def test_pipelined_kernels_beside_torch_compile():
    records = read_records(RESULTS / "pipelined-nvidia-h200.json")
    ratios = [record.peers["torch.compile"] / record.ours_us for record in records]
    said = words("bench/results/README.md")
    assert f"All {len(records)} points" in said
    assert f"{sum(ratio >= 1 for ratio in ratios)} are at least as fast as torch.compile" in said
    assert sum(0.99 <= ratio < 1 for ratio in ratios) == 5
    assert "five within 1%, and one" in said
