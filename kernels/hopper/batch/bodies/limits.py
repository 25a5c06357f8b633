"""Sampling ids within top-k and top-p for several sequences: an SM a sequence, from all of its
logits, behind the event at which all SMs have written theirs. Where ranks share the model, each has
all of their logits (team.py) and samples as one alone would.

In: the logits of a sequence, its settings and seed. Out: its id, in place of every SM's highest
logit. No SM waits for another's numbers, so that little of it lives beside the rest of the kernel.
A thread looks at every 256th logit and lists those that may be sampled, at first from a bound on
that the top_k-th reaches; limits are looked for in these lists, whatever their length. A listed
logit is a 64-bit word: its bits low, its row high. Next on the walk: kernel.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from distmega.kernels.hopper.batch_plan.fields import (
    BATCH_STATE_POSITIONS,
    MAX_SMS,
    NUM_ROWS,
    SEEDS_AT,
    SETTINGS,
    SETTINGS_AT,
)
from distmega.kernels.hopper.one_row.bodies.sample import PROBES, add, add_pairs, gumbel
from distmega.kernels.hopper.one_row.bodies.sample_all import NEVER_SAMPLED
from distmega.kernels.hopper.plan.fields import LOG2_E
from distmega.kernels.hopper.ptx.device import as_float, flagged_float, keep
from distmega.kernels.hopper.ptx.shapes import THREADS

DEPTH = gl.constexpr(32)
"""Logits that a thread loads at a time: as many bytes under way as hide their latency."""
LISTED = gl.constexpr(8)
"""Of its list."""
PEAKS = gl.constexpr(4)
"""Maxima that a thread keeps, as many in all as top_k may be where it bounds candidates."""
NO_ROW = gl.constexpr(0x7FFFFFFF)


@constexpr_function
def columns_of(rows: int) -> gl.BlockedLayout:
    """[rows, 256]: a column a thread."""
    return gl.BlockedLayout([rows, 1], [1, 32], [1, 8], [0, 1])


def list_words(num_logits: int) -> int:
    """64-bit words of the lists of a sequence."""
    size: int = DEPTH.value * THREADS.value
    return -(-num_logits // size) * size


@gluon.jit
def item_numbers(first, ROWS: gl.constexpr):
    """Numbers of ROWS times 256 words from `first` on."""
    i = gl.arange(0, ROWS, layout=gl.SliceLayout(1, columns_of(ROWS)))
    t = gl.arange(0, THREADS, layout=gl.SliceLayout(0, columns_of(ROWS)))
    return first + gl.expand_dims(i, 1) * THREADS + gl.expand_dims(t, 0)


@gluon.jit
def load_some(logits, first, num_rows):
    """[32, 256] logits from row `first` on, -inf behind the last, and their rows. Past the
    first-level cache, which may hold those of the step before.
    """
    row = item_numbers(first, DEPTH)
    mask = row < num_rows
    return gl.load(logits + row, mask=mask, other=float("-inf"), cache_modifier=".cg"), row


@gluon.jit
def find_peaks(logits, num_rows):
    """[4, 256]: maxima of parts of the logits; -inf where a part is empty."""
    peaks = gl.full([PEAKS, THREADS], float("-inf"), gl.float32, layout=columns_of(PEAKS))
    for first in range(0, keep(num_rows), DEPTH * THREADS):
        x, _ = load_some(logits, first, num_rows)
        parts = gl.max(gl.reshape(x, [PEAKS, DEPTH // PEAKS, THREADS]), axis=1)
        peaks = gl.maximum(peaks, gl.convert_layout(parts, columns_of(PEAKS)))
    return peaks


@gluon.jit
def load_peaks(row_maxima, num_row_maxima, ROWS: gl.constexpr):
    """[4, 256]: the maxima of num_row_maxima parts of the logits, from each of ROWS times 256
    places; -inf behind them. More than four rows share places.
    """
    none = float("-inf")
    item = item_numbers(keep(0), PEAKS)
    if ROWS == 1:
        return gl.load(
            row_maxima + item, mask=item < num_row_maxima, other=none, cache_modifier=".cg"
        )
    is_there = item % THREADS < num_row_maxima
    peaks = gl.full([PEAKS, THREADS], none, gl.float32, layout=columns_of(PEAKS))
    for row in gl.static_range(0, ROWS, PEAKS):
        at = item + row * THREADS
        wanted = is_there & (at < ROWS * THREADS)
        found = gl.load(row_maxima + at, mask=wanted, other=none, cache_modifier=".cg")
        peaks = gl.maximum(peaks, found)
    return peaks


@gluon.jit
def count_peaks(peaks, least):
    """Peaks from `least` on."""
    return gl.sum(gl.sum((peaks >= least).to(gl.int32), axis=0), axis=0)


@gluon.jit
def find_bound(peaks, highest, top_k):
    """A number that the top_k-th logit reaches, close below it; with fewer peaks than that, or a
    top_k of 0, the lowest peak.
    """
    finite = gl.where(peaks > float("-inf"), peaks, float("inf"))
    bound = gl.min(gl.min(finite, axis=0), axis=0)
    high = gl.where((top_k > 0) & (count_peaks(peaks, bound) >= top_k), highest, bound)
    for _ in range(PROBES):
        middle = bound + (high - bound) * 0.5
        enough = count_peaks(peaks, middle) >= top_k
        bound = gl.where(enough, middle, bound)
        high = gl.where(enough, high, middle)
    return bound


@gluon.jit
def mass_of_all(logits, num_rows, highest, scale):
    """Mass of all logits."""
    mass = gl.zeros([THREADS], gl.float32, layout=gl.SliceLayout(0, columns_of(DEPTH)))
    for first in range(0, keep(num_rows), DEPTH * THREADS):
        x, _ = load_some(logits, first, num_rows)
        mass += gl.sum(gl.exp2((x - highest) * scale), axis=0)
    return gl.sum(mass, axis=0)


@gluon.jit
def list_logits(logits, num_rows, bound, lists):
    """Lists the logits from `bound` on; the length of each thread's list."""
    num = gl.zeros([THREADS], gl.int32, layout=gl.SliceLayout(0, columns_of(DEPTH)))
    for first in range(0, keep(num_rows), DEPTH * THREADS):
        x, row = load_some(logits, first, num_rows)
        hit = (x >= bound) & (x > float("-inf"))
        flags = hit.to(gl.int32)
        slot = gl.associative_scan(flags, 0, add) + gl.expand_dims(num - 1, 0)
        at = slot * THREADS + row % THREADS
        gl.store(lists + at, flagged_float(x, row), mask=hit)
        num += gl.sum(flags, axis=0)
    return gl.convert_layout(num, gl.SliceLayout(0, columns_of(LISTED)))


@gluon.jit
def load_listed(lists, first, num):
    """[8, 256] logits from place `first` of the lists on, -inf behind their ends; their rows."""
    at = item_numbers(first * THREADS, LISTED)
    here = at // THREADS < gl.expand_dims(num, 0)
    word = gl.load(lists + at, mask=here, other=0)
    return gl.where(here, as_float(word.to(gl.int32)), float("-inf")), (word >> 32).to(gl.int32)


@gluon.jit
def tally(lists, num, longest, least, highest, scale):
    """Number and mass of the listed logits from `least` on."""
    count = gl.zeros([THREADS], gl.int32, layout=gl.SliceLayout(0, columns_of(LISTED)))
    mass = gl.zeros([THREADS], gl.float32, layout=gl.SliceLayout(0, columns_of(LISTED)))
    for first in range(0, keep(longest), LISTED):
        x, _ = load_listed(lists, first, num)
        hit = x >= least
        count += gl.sum(hit.to(gl.int32), axis=0)
        mass += gl.sum(gl.where(hit, gl.exp2((x - highest) * scale), 0.0), axis=0)
    return gl.reduce((count, mass), 0, add_pairs)


@gluon.jit
def list_enough(logits, num_rows, bound, highest, heat, scale, top_k, wanted, lists):
    """Lists logits from a bound on which top_k of them reach and which have the mass `wanted`, or
    all that can be sampled: the lengths, the longest, the bound, how many are listed, their mass.
    """
    floor = highest - NEVER_SAMPLED * heat
    bound = gl.maximum(bound, floor)
    wider = highest - 4.0 * (highest - bound)
    num = gl.zeros([THREADS], gl.int32, layout=gl.SliceLayout(0, columns_of(LISTED)))
    longest = 0
    count = 0
    mass = 0.0
    tries = 0
    while (tries == 0) | (((count < top_k) | (mass < wanted)) & (bound > floor)):
        if tries > 0:
            bound = gl.maximum(wider, floor)
            wider = floor
        num = list_logits(logits, num_rows, bound, lists)
        longest = gl.max(num, axis=0)
        count, mass = tally(lists, num, longest, bound, highest, scale)
        tries += 1
    return num, longest, bound, count, mass


@gluon.jit
def find_cutoff(lists, num, longest, low, low_num, mass, highest, scale, top_k, top_p, wanted):
    """The least listed logit that may be sampled; see ops.cutoff. low: a bound, which low_num
    logits of that mass reach. wanted: mass within top_p where top_k is 0.
    """
    above = highest + gl.maximum(gl.abs(highest) * 1e-3, 1e-3)
    if top_k > 0:
        high = above
        middle = low + (high - low) * 0.5
        while (low_num > top_k) & (middle > low) & (middle < high):
            found_num, found = tally(lists, num, longest, middle, highest, scale)
            enough = found_num >= top_k
            low = gl.where(enough, middle, low)
            low_num = gl.where(enough, found_num, low_num)
            mass = gl.where(enough, found, mass)
            high = gl.where(enough, high, middle)
            middle = low + (high - low) * 0.5
        wanted = mass * top_p
    if top_p < 1.0:
        high = above
        high_num = 0
        middle = low + (high - low) * 0.5
        while (low_num - high_num > 1) & (middle > low) & (middle < high):
            found_num, found = tally(lists, num, longest, middle, highest, scale)
            enough = found >= wanted
            low = gl.where(enough, middle, low)
            low_num = gl.where(enough, found_num, low_num)
            high = gl.where(enough, high, middle)
            high_num = gl.where(enough, high_num, found_num)
            middle = low + (high - low) * 0.5
    return low


@gluon.jit
def sample_listed(lists, num, longest, cutoff, temperature, seed, position):
    """The row of the best candidate from `cutoff` on, the lowest among equals."""
    best = gl.full([LISTED, THREADS], float("-inf"), gl.float32, layout=columns_of(LISTED))
    best_row = gl.full([LISTED, THREADS], NO_ROW, gl.int32, layout=columns_of(LISTED))
    for first in range(0, keep(longest), LISTED):
        x, row = load_listed(lists, first, num)
        sampled = gl.where(
            x >= cutoff, x + temperature * gumbel(row, position, seed), float("-inf")
        )
        better = (sampled > best) | ((sampled == best) & (row < best_row) & (x >= cutoff))
        best = gl.where(better, sampled, best)
        best_row = gl.where(better, row, best_row)
    highest = gl.max(gl.max(best, axis=0), axis=0)
    return gl.min(gl.min(gl.where(best == highest, best_row, NO_ROW), axis=0), axis=0)


@gluon.jit
def sample_within(
    logits,
    num_rows,
    row_maxima,
    num_row_maxima,
    sampling,
    seed,
    position,
    lists,
    HIGH_ROWS: gl.constexpr = 1,
):
    """The row sampled from num_rows logits. row_maxima: f32 [HIGH_ROWS, 256], of which
    num_row_maxima a row are the highest logit of each of as many parts of them. sampling: f32,
    (temperature, top_k, top_p). lists: i64 [list_words(num_rows)], this program's.
    """
    temperature = gl.load(sampling)
    top_k = gl.load(sampling + 1).to(gl.int32)
    top_p = gl.load(sampling + 2)
    heat = gl.maximum(temperature, 1e-30)
    scale = LOG2_E / heat
    num_parts = num_row_maxima if HIGH_ROWS == 1 else num_row_maxima * min(HIGH_ROWS, PEAKS)
    if (top_k == 0) | (top_k > num_parts):
        peaks = find_peaks(logits, num_rows)
    else:
        peaks = load_peaks(row_maxima, num_row_maxima, HIGH_ROWS)
    highest = gl.max(gl.max(peaks, axis=0), axis=0)
    bound = find_bound(peaks, highest, top_k)
    wanted = 0.0
    if top_k == 0:
        wanted = mass_of_all(logits, num_rows, highest, scale) * top_p
    num, longest, low, low_num, mass = list_enough(
        logits, num_rows, bound, highest, heat, scale, top_k, wanted, lists
    )
    cutoff = find_cutoff(
        lists, num, longest, low, low_num, mass, highest, scale, top_k, top_p, wanted
    )
    row = sample_listed(lists, num, longest, cutoff, temperature, seed, position)
    return gl.where(row == NO_ROW, 0, row)


@gluon.jit
def sample_within_limits(
    words,
    logits,
    row_maxima,
    events,
    sample_words,
    bests,
    best_rows,
    state,
    batch,
    step,
    sm,
    num_sms,
    RANKS: gl.constexpr,
):
    """The ids of this SM's sequences, as the best candidates of all SMs.

    words: int32, of the instruction. logits: f32 [16, num_rows], row_maxima: f32 [16, 256 a rank],
    of all ranks, which other SMs have written, visible behind an event or hear_ranks. events: seeds
    and settings from the runner; from 64-bit word sample_words on lists, which this SM alone writes
    for its sequences. bests, best_rows: f32 and int32 [16, 256], of which it writes its sequences'
    rows. state: positions; step: in this launch.
    """
    symmetric = gl.multiple_of(events.to(gl.pointer_type(gl.int64), bitcast=True), 16)
    sampling = (symmetric + SETTINGS_AT).to(gl.pointer_type(gl.float32), bitcast=True)
    num_rows = words[NUM_ROWS]
    size = (num_rows + DEPTH * THREADS - 1) // (DEPTH * THREADS) * (DEPTH * THREADS)
    for b in range(keep(sm), keep(batch), keep(num_sms)):
        row = sample_within(
            logits + b * num_rows,
            num_rows,
            row_maxima + b * (RANKS * MAX_SMS),
            keep(num_sms),
            sampling + b * SETTINGS,
            gl.load(symmetric + SEEDS_AT + b),
            gl.load(state + BATCH_STATE_POSITIONS + b) + step,
            symmetric + keep(sample_words) + b * size,
            RANKS,
        )
        item = item_numbers(keep(0), 1)
        none = gl.zeros([1, THREADS], gl.int32, layout=columns_of(1))
        at, mine = b * MAX_SMS + item, item < keep(num_sms)
        gl.store(bests + at, none.to(gl.float32), mask=mine)
        gl.store(best_rows + at, none + row, mask=mine)
