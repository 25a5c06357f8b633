"""The memory that instructions of a rank name, as torch has it.

In: arenas, a Ref of an instruction. Out: a view of what it names, on this rank or on a peer. Next
on the walk: reference.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from distmega.kernels.isa.encoding import Words
from distmega.kernels.isa.opcodes import Ref
from distmega.kernels.runtime.arena import ALIGNMENT_BYTES
from distmega.kernels.runtime.memory import typed_view


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """What the instructions of one rank reach.

    arenas: weight, state, activation and peer arena of this rank, in the order of Space. teams: for
    each mesh axis the peer arenas of this rank's team, in rank order. coordinate: this rank's index
    along each mesh axis, which is its rank in that team. constants: the constant table.
    """

    arenas: tuple[Tensor, ...]
    teams: tuple[tuple[Tensor, ...], ...]
    coordinate: tuple[int, ...]
    constants: Words

    def view(
        self, ref: Ref, shape: Sequence[int], strides: Sequence[int], first: int = 0
    ) -> Tensor:
        """An operand of an instruction, `first` elements further on."""
        return peer_view(self.arenas[ref.space], ref, shape, strides, first)


def peer_view(
    arena: Tensor, ref: Ref, shape: Sequence[int], strides: Sequence[int], first: int = 0
) -> Tensor:
    """An operand in a given arena of its space: that of another rank, say."""
    return typed_view(
        arena, ref.dtype, ref.base * ALIGNMENT_BYTES, ref.first + first, shape, strides
    )
