"""Runs uGraphs' kernels under Triton's interpreter, in a process of its own: the interpreter is
chosen before Triton is imported. Reads graphs from files, prints the largest error of each against
the graph's own interpreter, as a share of the largest value. A number behind a file's name is how
many blocks take all of them in turn.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from triton import language as tl
from triton.runtime import interpreter

from distmega.kernels.ugraphs.runner import GraphRunner
from distmega.kernels.ugraphs.source import GraphLaunch
from distmega.superopt.graph.arithmetic import Float
from distmega.superopt.graph.interpret import run_graph
from distmega.superopt.graph.text import parse_graph
from distmega.superopt.graph.ugraph import UGraph
from tests.kernels.interpreting import patch_tensors

DOT = interpreter.InterpreterBuilder.create_dot


def dot(
    builder: interpreter.InterpreterBuilder,
    a: interpreter.TensorHandle,
    b: interpreter.TensorHandle,
    *others: object,
) -> interpreter.TensorHandle:
    """As Triton's, but of bf16 operands too, which it keeps as their bits and multiplies so."""

    def wide(x: interpreter.TensorHandle) -> interpreter.TensorHandle:
        if x.dtype.scalar != tl.bfloat16:
            return x
        data = interpreter._convert_float(x.data, tl.bfloat16, tl.float32, None).view(np.float32)
        return interpreter.TensorHandle(data, tl.float32)

    return DOT(builder, wide(a), wide(b), *others)


@contextmanager
def mended_interpreter() -> Iterator[None]:
    """Triton's interpreter with what uGraphs' kernels need besides."""
    with (
        patch.object(interpreter, "_patch_lang_tensor", patch_tensors),
        patch.object(interpreter.InterpreterBuilder, "create_dot", dot),
    ):
        yield


def error_of(graph: UGraph, resident: int) -> float:
    """Of a graph in f32, on normal inputs."""
    rng = np.random.default_rng(0)
    launch = GraphLaunch(num_warps=4, stages=2, resident=resident)
    run = GraphRunner.of(graph, [launch] * len(graph.kernels))
    inputs = {t.name: rng.standard_normal(run.shape(t)) for t in graph.tensors if t.role != "temp"}
    given = {name: torch.from_numpy(x).float() for name, x in inputs.items()}
    expected = run_graph(graph, {name: (x[None],) for name, x in inputs.items()}, Float())
    found = run(given)
    return max(
        float(np.abs(found[n].numpy() - expected[n][0][0]).max() / np.abs(expected[n][0]).max())
        for n in graph.outputs
    )


if __name__ == "__main__":
    with mended_interpreter():
        for argument in sys.argv[1:]:
            name, _, resident = argument.partition(":")
            graph = parse_graph(Path(name).read_text())
            print(f"{error_of(graph, int(resident or 0)):.2e}", flush=True)
