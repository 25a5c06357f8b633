"""What an emulated GPU makes of a program, and the hash of the queues that it ran."""

import hashlib
from collections.abc import Mapping
from contextlib import suppress

import torch
from torch import Tensor

from distmega.errors import UnsupportedError
from distmega.kernels.hopper.batch_plan import words as batch_words
from distmega.kernels.hopper.batch_plan.types import BatchQueues
from distmega.kernels.hopper.plan import words
from distmega.kernels.hopper.plan.extents import count_rows
from distmega.kernels.hopper.plan.types import RowQueues
from distmega.program.types import Program
from tests.kernels.hopper.emulator.batch.test_batch_emulator import batch_case, emulate
from tests.kernels.hopper.emulator.emulating import case_of


def hash_of(queues: RowQueues | BatchQueues) -> str:
    """Of the words of all SMs."""
    if isinstance(queues, BatchQueues):
        rows = [list(map(batch_words.pack, queue)) for queue in queues.queues]
    else:
        rows = [list(map(words.pack, queue)) for queue in queues.queues]
    return hashlib.sha256(repr(rows).encode()).hexdigest()


def hash_of_words(encoded: Tensor, counts: Tensor | None = None) -> str:
    """As hash_of, of words [SMs, instructions, 16] as a GPU has them; counts: of each SM, if they
    have not all as many.
    """
    num = encoded.shape[1]
    lengths = [num] * len(encoded) if counts is None else counts.tolist()
    rows = [each[:length] for each, length in zip(encoded.tolist(), lengths, strict=True)]
    return hashlib.sha256(repr(rows).encode()).hexdigest()


def emulated(
    program: Program, values: Mapping[str, Tensor], num_sms: int, seed: int
) -> tuple[str, list[Tensor]]:
    """The hash, and outputs in order, in the program's types; by the kernel of several rows where
    that of one row refuses one.
    """
    inputs = {one.name: values[one.name] for one in program.with_role("input")}
    row_case = None
    if count_rows(program) == 1:
        with suppress(UnsupportedError):
            row_case = case_of(program, num_sms=num_sms)
    if row_case is None:
        case = batch_case(program, num_sms=num_sms)
        ((found,),) = emulate(case, values, [inputs], seed)
        tokens = torch.tensor(found.ids[0]) if found.ids else None
    else:
        ((one,),) = row_case.emulate(values, [inputs], seed)
        case, found = row_case, one
        tokens = torch.tensor(one.ids) if one.ids else None
    tensors = program.tensor_map()
    outs = []
    for name in program.outputs:
        tensor = tensors[name]
        if tensor.dtype == "i64":
            assert tokens is not None
            outs.append(tokens.view(tensor.shape))
        else:
            outs.append(found.outputs[name].bfloat16().view(tensor.shape))
    return hash_of(case.queues[0]), outs
