"""Runs the PTX of inline assembly on a CPU, 32 lanes of a warp at a time, on numpy arrays.

Only what our own PTX uses. Lanes that part wait at a label further down. A wait for an mbarrier is
over at once; arrivals are counted.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

LANES = 32
Lanes = np.ndarray


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """float32 rounded to the nearest bf16, as uint32."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def bf16_floats(bits: np.ndarray) -> np.ndarray:
    """The float32 of bf16 bits."""
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


def _pair(low: Lanes, high: Lanes) -> Lanes:
    return bf16_bits(low) | bf16_bits(high) << 16


def _halves(word: Lanes) -> tuple[Lanes, Lanes]:
    return bf16_floats(word & 0xFFFF), bf16_floats(word >> 16)


@dataclass(slots=True)
class Warp:
    """One warp: registers as uint32 bits, shared memory as uint8, how often each mbarrier was
    arrived at. land: called with an mbarrier and the phase that is waited for.
    """

    number: int
    shared: np.ndarray
    registers: dict[str, Lanes] = field(default_factory=dict)
    arrivals: Counter[int] = field(default_factory=Counter)
    land: Callable[[int, int], None] = lambda bar, phase: None

    def run(self, text: str, operands: Mapping[int, Lanes]) -> dict[str, Lanes]:
        """Executes the text; operands are bits by number. All registers afterwards."""
        self.registers = {f"${i}": np.asarray(v, np.uint32) for i, v in operands.items()}
        lines: list[str] = []
        for part in re.split(r"[;\n]", re.sub(r"[{}]", " ", text)):
            line = " ".join(part.split())
            if line and not line.startswith((".reg", "//")):
                lines.append(line)
        labels = {line[:-1]: i for i, line in enumerate(lines) if line.endswith(":")}
        at, awake = 0, np.ones(LANES, bool)
        waiting: dict[str, Lanes] = {}
        while at < len(lines):
            line = lines[at]
            at += 1
            if line.endswith(":"):
                awake = awake | waiting.pop(line[:-1], np.zeros(LANES, bool))
                continue
            target, mask = self.step(line, awake)
            if target and (mask == awake).all():
                at = labels[target]
            elif target and mask.any():
                assert labels[target] >= at, f"lanes part at {line!r}"
                waiting[target] = waiting.get(target, mask) | mask
                awake = awake & ~mask
        return self.registers

    def step(self, line: str, mask: Lanes) -> tuple[str, Lanes]:
        """Executes a line in the lanes of the mask, or gives the label that it branches to; and the
        lanes that do so.
        """
        if line.startswith("@"):
            guard, line = line.split(" ", 1)
            holds = self.registers[guard.lstrip("@!")].astype(bool)
            mask = mask & (~holds if guard.startswith("@!") else holds)
        name, _, rest = line.partition(" ")
        if name in ("bra", "bra.uni"):
            return rest, mask
        arguments = [word.strip() for word in rest.split(",")]
        self.execute(name, arguments, mask)
        return "", mask

    def read(self, word: str) -> Lanes:
        special = {
            "%tid.x": self.number * LANES + np.arange(LANES),
            "%laneid": np.arange(LANES),
            "%lanemask_lt": (1 << np.arange(LANES)) - 1,
        }
        if word in special:
            return special[word].astype(np.uint32)
        if word.startswith("0f"):
            return np.full(LANES, int(word[2:], 16), np.uint32)
        if re.fullmatch(r"-?\d+\.\d+e[+-]\d+", word):
            return np.full(LANES, float(word), np.float32).view(np.uint32)
        if re.fullmatch(r"-?\d+|0x[0-9a-f]+", word):
            return np.full(LANES, int(word, 0) & 0xFFFFFFFF, np.uint32)
        return self.registers[word]

    def write(self, word: str, value: Lanes, mask: Lanes) -> None:
        value = np.asarray(value)
        bits = value.view(np.uint32) if value.dtype == np.float32 else value.astype(np.uint32)
        old = self.registers.get(word, np.zeros(LANES, np.uint32))
        self.registers[word] = np.where(mask, bits, old)

    def address(self, word: str) -> Lanes:
        base, _, offset = word.strip("[]").partition("+")
        return self.read(base).astype(np.int64) + int(offset or 0)

    def load(self, at: Lanes, num_bytes: int) -> np.ndarray:
        """[lanes, num_bytes]."""
        assert (at % num_bytes == 0).all(), f"{num_bytes} bytes at {at[at % num_bytes != 0]}"
        return self.shared[at[:, None] + np.arange(num_bytes)]

    def execute(self, name: str, words: Sequence[str], mask: Lanes) -> None:
        """One instruction; words are its operands, vectors taken apart."""
        kind = name.split(".")
        if kind[0] == "mbarrier":
            if kind[1] == "try_wait":
                self.land(int(self.address(words[1])[0]), int(self.read(words[2])[0]))
                self.write(words[0], np.ones(LANES), mask)
            else:
                self.arrivals.update(self.address(words[1])[mask].tolist())
        elif kind[0] == "ld":
            outs, at = words[:-1], np.where(mask, self.address(words[-1]), 0)
            found = np.ascontiguousarray(self.load(at, 4 * len(outs))).view(np.uint32)
            for i, out in enumerate(outs):
                self.write(out, found[:, i], mask)
        elif kind[0] == "st":
            values = np.stack([self.read(word) for word in words[1:]], axis=1)
            at = self.address(words[0])
            self.load(at[mask], values.shape[1] * 4)
            data = np.ascontiguousarray(values).view(np.uint8)
            self.shared[at[mask, None] + np.arange(data.shape[1])] = data[mask]
        elif kind[0] == "ldmatrix":
            rows = np.ascontiguousarray(self.load(self.address(words[-1]), 16)).view(np.uint16)
            for i, out in enumerate(words[:-1]):
                matrix = rows[8 * i : 8 * i + 8].astype(np.uint32)
                matrix = matrix.T if "trans" in kind else matrix
                self.write(out, (matrix[:, ::2] | matrix[:, 1::2] << 16).reshape(-1), mask)
        elif kind[0] == "movmatrix":
            word = self.read(words[1]).reshape(8, 4)
            matrix = np.stack([word & 0xFFFF, word >> 16], axis=2).reshape(8, 8).T
            self.write(words[0], (matrix[:, ::2] | matrix[:, 1::2] << 16).reshape(-1), mask)
        elif kind[0] == "mma":
            self.multiply(words, mask)
        elif kind[0] == "vote":
            bits = self.read(words[1]).astype(bool)
            self.write(words[0], np.full(LANES, (bits << np.arange(LANES)).sum()), mask)
        elif kind[0] == "shfl":
            lane = np.arange(LANES)
            other = self.read(words[2]).astype(np.int64)
            source = (lane ^ other if kind[2] == "bfly" else other) % LANES
            self.write(words[0], self.read(words[1])[source], mask)
        elif kind[0] not in ("bar", "fence"):
            self.calculate(name, words, mask)

    def multiply(self, words: Sequence[str], mask: Lanes) -> None:
        """m16n8k16 of bf16."""
        left, right = np.zeros((16, 16), np.float32), np.zeros((16, 8), np.float32)
        row, column = np.arange(LANES) // 4, np.arange(LANES) % 4 * 2
        for i in range(4):
            for j, half in enumerate(_halves(self.read(words[4 + i]))):
                left[row + i % 2 * 8, column + i // 2 * 8 + j] = half
        for i in range(2):
            for j, half in enumerate(_halves(self.read(words[8 + i]))):
                right[column + 8 * i + j, row] = half
        product = left @ right
        for i in range(4):
            part = product[row + i // 2 * 8, column + i % 2]
            self.write(words[i], part + self.read(words[10 + i]).view(np.float32), mask)

    def calculate(self, name: str, words: Sequence[str], mask: Lanes) -> None:
        """Arithmetic, by lanes."""
        kind = name.split(".")
        bits = [self.read(word) for word in words[1:]]
        if kind[0] == "setp":
            signed = kind[-1] in ("s32", "f32")
            view = {"s32": np.int32, "f32": np.float32}.get(kind[-1], np.uint32)
            a, b = (x.view(view) if signed else x for x in bits[:2])
            found = _COMPARE[kind[1]](a, b)
            self.write(words[0], found & bits[2].astype(bool) if kind[2] == "and" else found, mask)
        elif kind[0] == "selp":
            self.write(words[0], np.where(bits[2].astype(bool), bits[0], bits[1]), mask)
        elif kind[0] == "cvt":
            high, low = (x.view(np.float32) for x in bits)
            self.write(words[0], _pair(low, high), mask)
        elif kind[-1] == "bf16x2":
            (a0, a1), (b0, b1) = map(_halves, bits)
            self.write(words[0], _pair(a0 * b0, a1 * b1), mask)
        elif kind[-1] == "f32":
            floats = [x.view(np.float32) for x in bits]
            self.write(words[0], _FLOAT[kind[0]](*floats).astype(np.float32), mask)
        else:
            signed = [x.view(np.int32) for x in bits] if kind[-1] == "s32" else bits
            self.write(words[0], _INTEGER[kind[0]](*signed), mask)


def _count_bits(words: Lanes) -> Lanes:
    return np.unpackbits(np.ascontiguousarray(words).view(np.uint8)).reshape(LANES, -1).sum(axis=1)


_COMPARE: dict[str, Callable[[Lanes, Lanes], Lanes]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal,
}  # fmt: skip
_FLOAT: dict[str, Callable[..., Lanes]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum, "ex2": np.exp2,
    "rcp": np.reciprocal,
    "fma": lambda a, b, c: a * b + c, "mov": lambda a: a,
}  # fmt: skip
_INTEGER: dict[str, Callable[..., Lanes]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.floor_divide,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "popc": _count_bits,
    "min": np.minimum, "mov": lambda a: a,
    "shr": lambda a, b: a >> b, "shl": lambda a, b: a << b,
    "mad": lambda a, b, c: a * b + c,
}  # fmt: skip
