"""Tensors that kernels, ranks and the engine make for themselves say where they lie: a caller may
have set torch's default device."""

import ast
from collections.abc import Iterator

from tests.repo.source import ROOT, modules, parsed

MAKERS = {
    "arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand",
    "randint", "randn", "tensor", "zeros",
}  # fmt: skip
FREE = ("calibrate.py", "torch_import", "kernels/hopper/emulator")
"""Parts of paths: calibration runs within the device that it measures; what is imported, or
emulated, is torch's on a CPU.
"""


def undecided(tree: ast.AST) -> Iterator[int]:
    """Lines of calls of torch that make a tensor on whatever device is the default."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in MAKERS
            and ast.unparse(node.func.value) == "torch"
            and not any(keyword.arg in ("device", None) for keyword in node.keywords)
        ):
            yield node.lineno


def test_a_call_without_a_device_is_found():
    source = "torch.zeros(1, pin_memory=True)\ntorch.empty(2, device=x)\nnp.zeros(3)\n"
    assert list(undecided(ast.parse(source))) == [1]


def test_every_tensor_that_is_made_names_its_device():
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in modules().values()
        if not any(part in path.as_posix() for part in FREE)
        for line in undecided(parsed(path))
    ]
    assert not found
