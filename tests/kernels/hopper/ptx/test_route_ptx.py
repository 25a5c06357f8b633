"""The PTX that ranks experts, run here instruction by instruction: ties, zeros of both signs,
infinities, and numbers of experts that fill no round.
"""

import operator
import random
import re
import struct
from collections.abc import Callable

import pytest

from distmega.kernels.hopper.ptx.route import rank_asm

ONES = 2**32 - 1
THREADS = 256
NUM_KEYS = 512
NUM_CHOSEN = 8


def as_bits(score: float) -> int:
    (bits,) = struct.unpack("<I", struct.pack("<f", score))
    return bits


def signed(bits: int) -> int:
    return bits - 2**32 if bits >> 31 else bits


def key_of(score: float) -> int:
    """As one_row/route.py makes it."""
    bits = as_bits(score + 0.0)
    return bits ^ 0x7FFFFFFF if bits >> 31 else bits


def times_plus(a: int, b: int, c: int) -> int:
    return a * b + c


FUNCTIONS: dict[str, Callable[..., int]] = {
    "mov": lambda a: a,
    "add": operator.add,
    "sub": operator.sub,
    "div": operator.floordiv,
    "rem": operator.mod,
    "mul.lo": operator.mul,
    "mad.lo": times_plus,
    "shr.s32": lambda a, by: signed(a) >> by,
    "and": operator.and_,
    "xor": operator.xor,
    "setp.ge": operator.ge,
    "setp.lt": operator.lt,
    "setp.gt": operator.gt,
    "setp.eq.and": lambda a, b, also: int(a == b and also),
    "set.gt.u32.s32": lambda a, b: ONES * (signed(a) > signed(b)),
    "selp": lambda a, b, first: a if first else b,
}
"""By the longest part of an instruction's name that stands here."""


class Thread:
    """One thread's registers; `memory` are the words of shared memory."""

    def __init__(self, memory: list[int], number: int, **given: int) -> None:
        self.memory = memory
        self.registers = {"%tid.x": number, **{f"${name[1:]}": x for name, x in given.items()}}

    def value(self, text: str) -> int:
        if text in self.registers:
            return self.registers[text]
        return int(text[2:], 16) if text.startswith("0f") else int(text, 0)

    def place(self, text: str) -> int:
        """The word that "[register + bytes]" means."""
        return sum(map(self.value, text.strip("[]").split("+"))) // 4

    def run(self, asm: str) -> None:
        lines = [line.strip().rstrip(";") for line in asm.splitlines()]
        labels = {line[:-1]: at for at, line in enumerate(lines) if line.endswith(":")}
        at = 0
        while at < len(lines):
            line, at = lines[at], at + 1
            if line in ("{", "}") or line.startswith(".reg") or line.endswith(":"):
                continue
            if line.startswith("@"):
                wanted, line = line[1:].split(" ", 1)
                if not self.registers[wanted]:
                    continue
            name, rest = line.split(" ", 1)
            operands = re.findall(r"[^,{}\s]+", rest)
            if name == "bra":
                at = labels[rest]
            elif name.startswith("ld.shared"):
                first = self.place(operands[-1])
                for nth, register in enumerate(operands[:-1]):
                    self.registers[register] = self.memory[first + nth]
            elif name.startswith("st.shared"):
                self.memory[self.place(operands[0])] = self.value(operands[1])
            else:
                known = max((k for k in FUNCTIONS if f"{name}.".startswith(f"{k}.")), key=len)
                result = FUNCTIONS[known](*map(self.value, operands[1:]))
                self.registers[operands[0]] = int(result) & ONES


INFINITY = float("inf")
KINDS = {
    "any": lambda rng: rng.gauss(0, 1),
    "few": lambda rng: rng.choice([-1.0, 0.0, -0.0, 1.0]),
    "none": lambda rng: -INFINITY,
    "infinite": lambda rng: rng.choice([-INFINITY, INFINITY, 2.5]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_experts", [8, 12, 60, 256])
def test_experts_are_ranked_by_score_then_number(num_experts: int, kind: str):
    rng = random.Random(num_experts)
    bits = [as_bits(KINDS[kind](rng)) for _ in range(num_experts)]
    scores = [struct.unpack("<f", struct.pack("<I", one))[0] for one in bits]
    memory = [key_of(score) for score in scores]
    memory += [key_of(-INFINITY)] * (NUM_KEYS - num_experts) + [0] * (2 * NUM_CHOSEN)
    order = sorted(range(num_experts), key=lambda number: (-scores[number], number))
    for number in {0, 1, 2, 3, 4, num_experts - 1, *order[:NUM_CHOSEN], THREADS - 1}:
        thread = Thread(memory, number, _2=0, _3=num_experts, _4=4 * NUM_KEYS)
        thread.run(rank_asm(NUM_CHOSEN))
        rank, score = thread.registers["$1"], thread.registers["$0"]
        if number < num_experts:
            assert rank == order.index(number)
            assert score == as_bits(scores[number] + 0.0)
        else:
            assert (rank, score) == (num_experts, as_bits(-INFINITY))
    assert memory[NUM_KEYS::2] == order[:NUM_CHOSEN]
