"""What an instruction of the kernel of one row does, in words that tests of decoders use."""

from distmega.kernels.hopper.plan.types import RowQueues
from distmega.kernels.hopper.plan.words import Instruction, RowLinear


def kind_of(queues: RowQueues, one: Instruction) -> str:
    """ "head" for products that a token is chosen from, "sum" for a sum over ranks, "gated" for two
    streams, "residual" for what takes a carried row, "qkv" for the rest, or the opcode.
    """
    if not isinstance(one, RowLinear):
        return one.opcode.name.lower()
    epilogue = queues.epilogues[one.opcode]
    if epilogue.ranked:
        return "head"
    if epilogue.summed or epilogue.deferred:
        return "sum"
    if epilogue.num_streams == 2:
        return "gated"
    return "residual" if epilogue.num_carried else "qkv"


def of_kind(queues: RowQueues, kind: str) -> list[Instruction]:
    """All instructions of a kind, SM by SM."""
    return [one for queue in queues.queues for one in queue if kind_of(queues, one) == kind]


def first_word(queues: RowQueues, name: str) -> int:
    """First flagged word of the buffer whose name ends so."""
    return next(buffer.first for buffer in queues.buffers if buffer.name.endswith(name))
