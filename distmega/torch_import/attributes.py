"""What a module holds, left as it was by whoever runs it to look at what it does.

In: a module. While `kept_attributes` lasts its forward may replace parameters, buffers and other
attributes, by tensors without values for example; behind it they are those of before. Used by
exported.py, repeats.py and huggingface/decoders.py. `replaced_tensors` says which of them a call
replaced.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from distmega.torch_import.replacements import Attribute, plain_tensors


@contextmanager
def kept_attributes(module: nn.Module) -> Iterator[None]:
    """Attributes of a module and of those inside it are afterwards the objects that they were, and
    dicts, lists and sets among them hold what they held.
    """
    held: dict[int, tuple[Any, Any]] = {}
    for part in module.modules():
        _hold(part.__dict__, held)
    try:
        yield
    finally:
        for container, before in held.values():
            _restore(container, before)


@contextmanager
def replaced_tensors(module: nn.Module) -> Iterator[set[Attribute]]:
    """Places of tensors that are neither parameters nor buffers, where a call of the module puts
    others; filled by calls while this lasts.
    """
    held = plain_tensors(module)
    found = set[Attribute]()

    def look(module: nn.Module, *given: object) -> None:
        for (path, name), x in held.items():
            now = module.get_submodule(path).__dict__.get(name)
            if isinstance(now, Tensor) and now is not x:
                found.add((path, name))

    hook = module.register_forward_hook(look) if held else None
    try:
        yield found
    finally:
        if hook is not None:
            hook.remove()


def _hold(container: Any, held: dict[int, tuple[Any, Any]]) -> None:
    """Copies a container and those inside it, by their ids."""
    if id(container) in held or not isinstance(container, dict | list | set):
        return
    held[id(container)] = container, container.copy()
    for each in container.values() if isinstance(container, dict) else container:
        _hold(each, held)


def _restore(container: Any, before: Any) -> None:
    """Puts back what a container held, where it holds anything else."""
    if _same(container, before):
        return
    if isinstance(container, list):
        container[:] = before
    else:
        container.clear()
        container.update(before)


def _same(container: Any, before: Any) -> bool:
    """Whether a container holds the same objects, but for sets in the same order; no object is
    compared.
    """
    if isinstance(container, dict):
        one, other = list(container.items()), list(before.items())
        return len(one) == len(other) and all(
            a[0] is b[0] and a[1] is b[1] for a, b in zip(one, other, strict=True)
        )
    if isinstance(container, list):
        return [*map(id, container)] == [*map(id, before)]
    return {id(each) for each in container} == {id(each) for each in before}
