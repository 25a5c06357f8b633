"""Kernels compiled for sm_90a on a machine without a GPU, and what their machine code holds."""

import json
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

GLUON_TYPES = MappingProxyType({"bf16": gl.bfloat16, "fp16": gl.float16, "fp32": gl.float32})
SHARED_BYTES = 232448
"""Most that a program of sm_90 may have."""
REGISTERS = 65536
"""Of an SM."""
_COORDINATE = re.compile(r"@global_smem, i\d+ (\d+)\)")
OBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A compiled kernel: PTX, and per thread registers and bytes of local memory (spills); bytes of
    shared memory, and where in them Triton's own accesses begin, one for each that it writes out;
    where its code is.
    """

    ptx: str
    registers: int
    stack_bytes: int
    shared_bytes: int
    shared_addresses: tuple[int, ...]
    cubin: Path


def descriptor(dtype: str, block: tuple[int, ...]) -> str:
    """Signature of a TMA descriptor, in the default layout of its block."""
    layout = gl.NVMMASharedLayout.get_default_for(list(block), GLUON_TYPES[dtype])
    return f"tensordesc<{dtype}[{', '.join(map(str, block))}],{layout!r}>"


def compile_kernel(
    kernel: triton.JITFunction,
    types: dict[str, object],
    constants: dict[str, object],
    num_warps: int,
    max_registers: int | None,
    multiples: Sequence[str] = (),
) -> Machine:
    """Compiles with the given types of arguments; arguments without one are constants or None. The
    type of a tuple is a tuple of types.

    multiples: numbers that are multiples of 16, as all pointers are.
    """
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    fixed = {(names.index(n),): constants.get(n) for n in names if n not in types}
    aligned = {
        path: [["tt.divisibility", 16]]
        for n, name in enumerate(names)
        for path, kind in _flat((n,), signature[name])
        if str(kind).startswith("*") or name in multiples
    }
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, fixed, aligned)
    options = {"num_warps": num_warps, "maxnreg": max_registers, "enable_fp_fusion": True}
    target = GPUTarget("cuda", 90, 32)
    return read_machine(triton.compile(source, target=target, options=options).metadata_group)


def _flat(path: tuple[int, ...], kind: object) -> Iterator[tuple[tuple[int, ...], object]]:
    """The types in a type and where they stand."""
    if isinstance(kind, tuple):
        for n, part in enumerate(kind):
            yield from _flat((*path, n), part)
    else:
        yield path, kind


def read_machine(files: Mapping[str, str]) -> Machine:
    """A compiled kernel from Triton's files of it, by name."""
    paths = {Path(path).suffix: Path(path) for path in files.values()}
    command = [str(OBJDUMP), "--dump-resource-usage", str(paths[".cubin"])]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return Machine(
        ptx=paths[".ptx"].read_text(),
        registers=int(found[1]),
        stack_bytes=int(found[2]),
        shared_bytes=json.loads(paths[".json"].read_text())["shared"],
        cubin=paths[".cubin"],
        shared_addresses=tuple(map(int, _COORDINATE.findall(paths[".llir"].read_text()))),
    )
