"""A host program is the same text in every process, whatever Python's hashes are there."""

import os
import subprocess
import sys

PROGRAM = """
from distmega import CPU, DeviceMesh, plan_program
from distmega.hostir.ir.text import print_host
from distmega.hostir.lower.lower import lower_program
from distmega.hostir.passes.passes import run_passes
from distmega.program.builder import ProgramBuilder
from distmega.sharding.localize import localize

p = ProgramBuilder("many")
x = p.input("x", (8, 8))
parts = [p.linear(x, p.weight(f"w{i}", (8, 8)), name=f"y{i}") for i in range(6)]
z = p.pointwise("a0 + a1 + a2 + a3 + a4 + a5", *parts, name="z")
plan = plan_program(p.build(z), DeviceMesh(tp=2), CPU)
print(print_host(run_passes(lower_program(localize(plan), megakernel=False, peer_memory=False))))
"""


def test_a_host_program_is_the_same_text_in_every_process():
    texts = set()
    for seed in ("1", "2", "3"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        assert done.stdout.count("free ") > 5
        texts.add(done.stdout)
    assert len(texts) == 1
