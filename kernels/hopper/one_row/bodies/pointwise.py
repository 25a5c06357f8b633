"""Pointwise work on rows: a formula of a whole row after its norm or softmax, and of what the SM
keeps.

In: flagged words of the row or the id's row, what the SM keeps, rows of tables. Out: flagged
words of the result, what the SM keeps of it. Every SM that has rows reads the whole row, so that
statistics need no exchange: a sum, or the greatest element, then the sum of what follows from it.
Next on the walk: kernel.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from distmega.kernels.gluon_compat import cta_barrier
from distmega.kernels.hopper.epilogues import count, field
from distmega.kernels.hopper.one_row.bodies.linear import (
    add_halves,
    flag_delta,
    next_vector,
    one_of_four,
    pairs_at,
    part_chunks,
    part_stride,
)
from distmega.kernels.hopper.plan.fields import (
    AT_POSITION,
    BIASED,
    CARRY_EMBEDDED,
    DST,
    FROM_EMBEDDING,
    LIN_CARRY,
    LIN_KEEP,
    LIN_NORM,
    LIN_NUM_ROWS,
    LIN_NUM_SRC_WORDS,
    LIN_PACKED,
    LIN_ROW0,
    NUM_UNITS,
    POINT_EPS,
    POINT_NUMBER,
    POINT_SECOND,
    POINT_TABLE,
    SRC,
)
from distmega.kernels.hopper.ptx.device import (
    as_float,
    bf16_pair,
    flagged,
    flagged_float,
    high_half,
    join_lanes,
    keep,
    low_half,
    single,
)
from distmega.kernels.hopper.ptx.shapes import (
    PER_THREAD,
    STAGE_CHUNKS,
    THREADS,
    UNIT_ROWS,
    VECTOR_MULTIPLE,
    WORDS_A_CHUNK,
)
from distmega.kernels.hopper.ptx.spins import spin2, spin_chunks, spin_parts, spin_ranks
from distmega.kernels.pipelined.pointwise.formula import evaluate


@constexpr_function
def form_of(formulas, number):
    """How x lies in flagged words: as "numbers", as "pairs", or as "parts", pairs of each rank."""
    one = formulas.each[number]
    return "numbers" if one.numbers else "parts" if one.parts else "pairs"


@constexpr_function
def elements_a_word(form):
    """Elements of x in a flagged word."""
    return 1 if form == "numbers" else 2


@gluon.jit
def no_values(NUM: gl.constexpr):
    """A tuple of so many zeros a thread."""
    values = ()
    zero = gl.zeros([THREADS], gl.float32, layout=PER_THREAD)
    for _ in gl.static_range(NUM):
        values += single(zero)
    return values


@gluon.jit
def some_of_parts(words, symmetric, flag, first, RANKS: gl.constexpr):
    """As some_of_row of pairs, x being the sum of all ranks' parts."""
    NUM: gl.constexpr = part_chunks(RANKS)
    values = ()
    for chunk in gl.static_range(0, STAGE_CHUNKS, NUM):
        word = first + chunk * WORDS_A_CHUNK + 2 * gl.arange(0, THREADS, layout=PER_THREAD)
        at = symmetric + (words[SRC] + word)
        num_left = words[LIN_NUM_SRC_WORDS] - word
        parts = spin_parts(symmetric, at, part_stride(words), flag, num_left, NUM, RANKS)
        for i in gl.static_range(2 * NUM):
            values += add_halves(parts, i, 2 * NUM, RANKS)
    return values


@gluon.jit
def some_of_words(words, symmetric, row, flag, first, NUMBERS: gl.constexpr, RANKS: gl.constexpr):
    """As some_of_row, x lying as one."""
    num_words = words[LIN_NUM_SRC_WORDS]
    word = first + 2 * gl.arange(0, THREADS, layout=PER_THREAD)
    if RANKS == 1 and not NUMBERS and (words[LIN_PACKED] & FROM_EMBEDDING) != 0:
        payloads = ()
        for i in gl.static_range(STAGE_CHUNKS):
            payloads += pairs_at(row, 0, word + i * WORDS_A_CHUNK, num_words)
    else:
        at = symmetric + (words[SRC] + word)
        payloads = spin_chunks(symmetric, at, flag, num_words - word, STAGE_CHUNKS, RANKS)
    values = ()
    for i in gl.static_range(2 * STAGE_CHUNKS):
        if NUMBERS:
            values += single(as_float(payloads[i]))
        else:
            values += single(low_half(payloads[i]))
            values += single(high_half(payloads[i]))
    return values


@gluon.jit
def some_of_row(words, symmetric, row, flag, first, FORM: gl.constexpr, RANKS: gl.constexpr):
    """Elements of x of eight words a thread, in two words of each chunk from word `first` on, zeros
    past the last.
    """
    if FORM == "parts":
        return some_of_parts(words, symmetric, flag, first, RANKS)
    else:
        return some_of_words(words, symmetric, row, flag, first, FORM == "numbers", RANKS)


@gluon.jit
def add_up(
    words, symmetric, row, flag, off, KIND: gl.constexpr, FORM: gl.constexpr,
    RANKS: gl.constexpr,
):  # fmt: skip
    """Over the whole row: its sum, or of what is left without `off` the squares or exponentials, or
    its greatest element. KIND: "sum", "squares", "exponentials", "most".
    """
    NUM: gl.constexpr = elements_a_word(FORM)
    num_words = words[LIN_NUM_SRC_WORDS]
    own = 2 * gl.arange(0, THREADS, layout=PER_THREAD)
    total = gl.full([THREADS], float("-inf") if KIND == "most" else 0.0, gl.float32, PER_THREAD)
    for first in range(0, keep(num_words), STAGE_CHUNKS * WORDS_A_CHUNK):
        values = some_of_row(words, symmetric, row, flag, keep(first), FORM, RANKS)
        for i in gl.static_range(2 * STAGE_CHUNKS * NUM):
            inside = first + own + i // (2 * NUM) * WORDS_A_CHUNK < num_words
            x = values[i]
            if KIND == "most":
                total = gl.maximum(total, gl.where(inside, x, float("-inf")))
            elif KIND == "sum":
                total += x
            elif KIND == "squares":
                left = gl.where(inside, x - off, 0.0)
                total += left * left
            else:
                total += gl.where(inside, gl.exp(x - off), 0.0)
    if KIND == "most":
        return gl.max(total, axis=0)
    else:
        return gl.sum(total, axis=0)


@gluon.jit
def find_scale(
    words, symmetric, row, flag, NORM: gl.constexpr, FORM: gl.constexpr, RANKS: gl.constexpr
):
    """What is taken off x, and what it, or its exponential, is multiplied by then."""
    inv_length = 1.0 / words[LIN_NUM_ROWS].to(gl.float32)
    eps = words[POINT_EPS].to(gl.float32, bitcast=True)
    off = gl.to_tensor(0.0)
    if NORM == "softmax":
        off = add_up(words, symmetric, row, flag, off, "most", FORM, RANKS)
        total = add_up(words, symmetric, row, flag, off, "exponentials", FORM, RANKS)
        factor = 1.0 / total
    else:
        if NORM == "layer_norm":
            off = add_up(words, symmetric, row, flag, off, "sum", FORM, RANKS) * inv_length
        total = add_up(words, symmetric, row, flag, off, "squares", FORM, RANKS)
        factor = gl.rsqrt(total * inv_length + eps)
    return off, factor


@gluon.jit
def own_rows(words, symmetric, given, flag, row, wanted, FORM: gl.constexpr, RANKS: gl.constexpr):
    """x of this SM's rows, one a thread."""
    if FORM == "numbers":
        at = symmetric + (words[SRC] + row // 2 * 2)
        even, odd = spin2(symmetric, at, flag, wanted, RANKS)
        x = as_float(gl.where(row % 2 == 0, even, odd))
    elif FORM == "parts":
        at = symmetric + (words[SRC] + row // 4 * 2)
        parts = spin_ranks(symmetric, at, part_stride(words), flag, wanted, RANKS)
        low, high = add_halves(parts, 0, 2, RANKS)
        low2, high2 = add_halves(parts, 1, 2, RANKS)
        left = gl.where(row % 4 < 2, low, low2)
        right = gl.where(row % 4 < 2, high, high2)
        x = gl.where(row % 2 == 0, left, right)
    else:
        if RANKS == 1 and (words[LIN_PACKED] & FROM_EMBEDDING) != 0:
            even, odd = pairs_at(given, 0, row // 4 * 2, words[LIN_NUM_SRC_WORDS])
        else:
            at = symmetric + (words[SRC] + row // 4 * 2)
            even, odd = spin2(symmetric, at, flag, wanted, RANKS)
        x = one_of_four(even, odd, row)
    return x


@gluon.jit
def normalised(words, vectors, x, row, wanted, off, factor, NORM: gl.constexpr, WIDE: gl.constexpr):
    """x after its norm or softmax, an element a thread."""
    if NORM == "softmax":
        return gl.exp(x - off) * factor
    else:
        y = (x - off) * factor
        weighted = wanted & (words[LIN_NORM] >= 0)
        biased = wanted & ((words[LIN_PACKED] & BIASED) != 0)
        if WIDE:
            wide = (vectors + words[LIN_NORM]).to(gl.pointer_type(gl.float32), bitcast=True)
            step = (2 * words[LIN_NUM_ROWS] + VECTOR_MULTIPLE - 1) // VECTOR_MULTIPLE
            after = wide + step * (VECTOR_MULTIPLE // 2)
            y = y * gl.load(wide + row, mask=weighted, other=1.0)
            y += gl.load(after + row, mask=biased, other=0.0)
        else:
            at = vectors + words[LIN_NORM] + row
            after = at + next_vector(words[LIN_NUM_ROWS])
            y = y * gl.load(at, mask=weighted, other=1.0).to(gl.float32)
            y += gl.load(after, mask=biased, other=0.0).to(gl.float32)
        return y


@gluon.jit
def carried_rows(words, given, kept, row, wanted):
    """What the SM keeps of the rows of another op, or the given row's, one a thread."""
    if (words[LIN_PACKED] & CARRY_EMBEDDED) != 0:
        value = gl.load(given + row, mask=wanted, other=0.0).to(gl.float32)
    else:
        mine = wanted & (words[LIN_CARRY] >= 0)
        value = gl.load(kept + words[LIN_CARRY] + row, mask=mine, other=0.0)
    return value


@gluon.jit
def table_row(words, vectors, row_id, position):
    """Where the row of a table begins: the id's or the position's."""
    index = gl.where((words[LIN_PACKED] & AT_POSITION) != 0, position, row_id)
    first = words[POINT_TABLE].to(gl.int64) * VECTOR_MULTIPLE
    return vectors + (first + index.to(gl.int64) * words[LIN_NUM_ROWS])


@gluon.jit
def of_next(value):
    """What the next thread has, for threads of even number."""
    # Gluon moves data between threads by layouts, through shared memory; this takes one instruction
    return gl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, 1, 31, 0xffffffff;",
        "=f,f",
        [value],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def write_rows(words, symmetric, kept, row, wanted, y, flag, KIND: gl.constexpr):
    """Results, one a thread, to where they are kept and polled."""
    gl.store(kept + words[LIN_KEEP] + row, y, mask=wanted & (words[LIN_KEEP] >= 0))
    if KIND == "numbers":
        gl.store(symmetric + (words[DST] + row), flagged_float(y, flag), mask=wanted)
    elif KIND == "pairs":
        pair = bf16_pair(y, of_next(y))
        at = symmetric + (words[DST] + row // 2)
        gl.store(at, flagged(pair, flag), mask=wanted & (row % 2 == 0))


@gluon.jit
def pointwise_task(
    words, symmetric, vectors, embed, row_id, position, kept, flag, FORMULAS: gl.constexpr,
    PASSES: gl.constexpr, WIDE: gl.constexpr, RANKS: gl.constexpr,
):  # fmt: skip
    """Rows of this SM, PASSES a thread.

    words: int32, of the instruction. symmetric, vectors, embed, kept: see RowMemory; reads flagged
    words and rows of `kept` that are this SM's, and writes such. row_id, position: of this step.
    flag: of what is written.
    """
    NUM: gl.constexpr = count(FORMULAS)
    before = flag - flag_delta(words)
    num_rows = words[LIN_NUM_ROWS]
    limit = gl.minimum(words[LIN_ROW0] + words[NUM_UNITS] * UNIT_ROWS, num_rows)
    given = embed + row_id.to(gl.int64) * num_rows
    thread = gl.arange(0, THREADS, layout=PER_THREAD)
    for i in gl.static_range(NUM):
        if words[POINT_NUMBER] == i:
            NORM: gl.constexpr = field(FORMULAS, i, "norm")
            FORM: gl.constexpr = form_of(FORMULAS, i)
            TAKEN: gl.constexpr = field(FORMULAS, i, "num_carried")
            off = gl.to_tensor(0.0)
            factor = gl.to_tensor(1.0)
            xs = no_values(PASSES)
            if NORM != "":
                xs = ()
                for j in gl.static_range(PASSES):
                    row = words[LIN_ROW0] + j * THREADS + thread
                    own = own_rows(words, symmetric, given, before, row, row < limit, FORM, RANKS)
                    xs += single(own)
            if NORM == "heard":
                add_up(words, symmetric, given, before, off, "sum", FORM, RANKS)
            elif NORM != "" and NORM != "copy":
                off, factor = find_scale(words, symmetric, given, before, NORM, FORM, RANKS)
            for j in gl.static_range(PASSES):
                row = words[LIN_ROW0] + j * THREADS + thread
                wanted = row < limit
                taken = ()
                if NORM != "":
                    x = xs[j]
                    if NORM != "copy" and NORM != "heard":
                        x = normalised(words, vectors, x, row, wanted, off, factor, NORM, WIDE)
                    taken += single(x)
                if TAKEN > 0:
                    taken += single(carried_rows(words, given, kept, row, wanted))
                if TAKEN > 1:
                    second = kept + words[POINT_SECOND] + row
                    taken += single(gl.load(second, mask=wanted, other=0.0))
                if field(FORMULAS, i, "has_table"):
                    at = table_row(words, vectors, row_id, position) + row
                    taken += single(gl.load(at, mask=wanted, other=0.0).to(gl.float32))
                y = evaluate(field(FORMULAS, i, "formula"), taken)
                write_rows(
                    words, symmetric, kept, row, wanted, y, flag, field(FORMULAS, i, "publishes")
                )
            join_lanes()
    cta_barrier()
