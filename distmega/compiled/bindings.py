"""The tensors that a compiled program uses where they are, from call to call.

Comes in: what `bind` and calls give, by name. Goes out: what is bound, and what of a call is new.
Used by program.py and running.py.
"""

from collections.abc import Mapping

from torch import Tensor

from distmega.compiled.given import GivenTensors
from distmega.errors import ProgramError
from distmega.hostir.library.torch_types import NO_MEMORY, is_plain, ordinary


class Bindings:
    """What is bound. given: what may be. held: memory of a kernel, which some tensors have to lie
    in. tensors: what is bound, by name. copied: inputs that `bind` was not given; they are copied
    to memory of the graph, or of a warm program.
    """

    def __init__(self, given: GivenTensors, held: dict[str, Tensor]) -> None:
        self._given, self._held = given, held
        self.tensors: dict[str, Tensor] = {}
        self._known: dict[str, KnownMemory] = {}
        """What changes nothing where a call brings it: what is bound, or was copied there."""
        self._unbound = frozenset(given.buffers)
        self.copied = given.inputs

    def copy_inputs(self) -> None:
        """From now on calls copy all inputs to where these are bound."""
        self.copied = self._given.inputs

    def hold(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Where tensors are from now on, once `adopt` is given them: in the kernel's memory, if it
        has the tensor there. ProgramError, before anything is written, for one that can't be bound.
        """
        for name, x in tensors.items():
            self._given.check(name, x)
            if x.is_neg():
                raise _negated(name)
            if name in self._given.states and not self._lies_right(name, x):
                raise ProgramError(
                    f"state {name!r} in memory of the caller",
                    expected="the one in `tensors`, which a kernel of the whole program updates",
                    remedy="fill it by load(), or compile with megakernel=False",
                )
        self._given.check_apart({**self.tensors, **tensors})
        return {
            name: ordinary(x) if self._lies_right(name, x) else self._held[name].copy_(x.detach())
            for name, x in tensors.items()
        }

    def _lies_right(self, name: str, x: Tensor) -> bool:
        """Whether it is where the kernel has that tensor, or the kernel has none."""
        held = self._held.get(name)
        return held is None or KnownMemory(held).has(x)

    def adopt(self, tensors: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> None:
        """Binds tensors, at where `hold` has put them."""
        others = {name for name, x in held.items() if x is not self.tensors.get(name)}
        self.copied = self.copied.difference(others)
        self.tensors |= held
        self._known |= {name: KnownMemory(x) for name, x in tensors.items()}
        self._unbound = self._unbound.difference(held)

    def sort(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The inputs of a call that are to be copied, and what it brings that isn't bound yet, or
        not so. ProgramError for what does not fit, or is missing.
        """
        inputs: dict[str, Tensor] = {}
        others: dict[str, Tensor] = {}
        for name, x in tensors.items():
            known = self._known.get(name)
            if known is not None and known.has(x):
                continue
            self._given.check(name, x)
            (inputs if name in self.copied else others)[name] = x
        if self._unbound and not self._unbound <= tensors.keys():
            raise _unbound(min(self._unbound - tensors.keys()))
        return inputs, others

    def load(self, parts: Mapping[str, Tensor]) -> None:
        """Copies parts into what is bound. ProgramError for one that isn't."""
        for name, part in parts.items():
            if name not in self.tensors:
                raise _unbound(name)
            self.tensors[name].detach().copy_(part)

    def clear(self) -> None:
        """Lets go of all."""
        for kept in (self._held, self.tensors, self._known):
            kept.clear()


class KnownMemory:
    """Where a tensor's values are, and how they lie there. Asked of each tensor that a call brings,
    though it is the one of the call before: its owner may have pointed it elsewhere since, by
    `x.data = y` or `x.t_()`, and a graph goes on to read where it was.
    """

    __slots__ = ("_address", "_alias", "_class", "_dtype", "_shape", "_strides")

    def __init__(self, x: Tensor) -> None:
        self._alias = x.detach()
        """Keeps the memory from others."""
        self._class = type(x)
        self._shape, self._strides, self._dtype = x.shape, x.stride(), x.dtype
        self._address = x.data_ptr()

    def has(self, x: object) -> bool:
        """Whether something given is a tensor of the same memory."""
        try:
            return (
                (type(x) is self._class or is_plain(x))  # the first is quick
                and x.data_ptr() == self._address
                and x.shape == self._shape
                and x.stride() == self._strides
                and x.dtype is self._dtype
                and not x.is_neg()
            )
        except NO_MEMORY:
            return False


def _unbound(name: str) -> ProgramError:
    return ProgramError(
        f"no tensor for {name!r}",
        expected="every input of this rank in each call, weights and states in the first",
        remedy="pass it by name, or bind() it before",
    )


def _negated(name: str) -> ProgramError:
    return ProgramError(
        f"{name!r} in memory that has its negative",
        expected="memory of its values, which is read as it is",
        remedy="give x.resolve_neg()",
    )
