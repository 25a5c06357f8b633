"""Pieces of PTX that the text of several tasks is put together from.

They use the predicate p, the registers slot and phase, and mbarriers in shared memory. Next on the
walk: products.py.
"""

from triton.runtime.jit import constexpr_function


@constexpr_function
def wait(label: str, bar: str, phase: str) -> list[str]:
    """Until the mbarrier at `bar` is past the phase; all lanes wait."""
    # .uni: all lanes go on together, as the products behind it need
    return [
        f"{label}:",
        f"mbarrier.try_wait.parity.shared::cta.b64 p, [{bar}], {phase};",
        f"@!p bra.uni {label};",
    ]


@constexpr_function
def registers(name: str, first: int, count: int) -> str:
    """So many registers of a name, from one number on."""
    return ", ".join(f"{name}{first + i}" for i in range(count))


@constexpr_function
def multiply(sums: str, left: str, right: str) -> str:
    """m16n8k16 of bf16; sums, left and right operand are lists of registers."""
    return (
        f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{sums}}}, {{{left}}}, "
        f"{{{right}}}, {{{sums}}};"
    )


@constexpr_function
def next_slot(stages: int) -> list[str]:
    """The ring slot after the one in `slot`, and its phase."""
    # by comparison: the number of stages is no power of two
    return [
        "add.u32 slot, slot, 1;",
        f"setp.eq.u32 p, slot, {stages};",
        "@p mov.u32 slot, 0;",
        "@p xor.b32 phase, phase, 1;",
    ]


@constexpr_function
def zeros(names: str | tuple[str, ...]) -> list[str]:
    """Four f32 registers of each name."""
    return [f"mov.f32 {name}{i}, 0f00000000;" for name in names for i in range(4)]


@constexpr_function
def number_operands(lines: list[str], names: tuple[str, ...], first: int) -> str:
    """The text, its $NAME being the operands from number `first` on."""
    text = "\n".join(["{", *lines, "}"])
    for name in sorted(names, key=len, reverse=True):
        text = text.replace(f"${name}", f"${first + names.index(name)}")
    return text
