"""Triton kernels that compute all statistics of a tensor, or of a list of tensors, in one read.

In `partial_rows`, one program reads each chunk of a tensor and writes a partial row. `combine_rows` combines a tensor's
partial rows into one row. No program waits for another, and nothing but whole numbers is added atomically, so results
are reproducible.

Where the device has float64, squares of narrower floats are summed directly in float64. Elsewhere (`split`), sums and
squares are kept apart for large, usual and small magnitudes, each scaled so that none overflows or underflows: Blue's
algorithm (J. L. Blue, A portable Fortran program to find the Euclidean norm of a vector, ACM TOMS 4, 1978).
"""

# Triton reads annotations as part of its own language, so the kernels' arguments have none.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from typing import Final

import triton
from triton import language as tl

PARTIAL_COLUMNS = 16
"""Numbers of a partial row: MIN to ZEROS below, padded to the next power of two."""

_MIN = tl.constexpr(0)
_MAX = tl.constexpr(1)
_SUM = tl.constexpr(2)
_SUM_LARGE = tl.constexpr(3)
_SQUARES_SMALL = tl.constexpr(4)
_SQUARES = tl.constexpr(5)
_SQUARES_LARGE = tl.constexpr(6)
_NANS = tl.constexpr(7)
_INFS = tl.constexpr(8)
_ZEROS = tl.constexpr(9)
_COLUMNS = tl.constexpr(PARTIAL_COLUMNS)
_ROW = tl.constexpr(8)

_SLOTS = tl.constexpr(512)
_MIDDLE = tl.constexpr(255)
_LARGEST = tl.constexpr(3.4028234663852886e38)

_LARGE = tl.constexpr(2.0**40)
_SMALL = tl.constexpr(2.0**-40)
_DOWN = tl.constexpr(2.0**-90)
_UP = tl.constexpr(2.0**90)


POINTERS: Final = ("x_pointer", "addresses", "sizes", "places", "slots", "partials", "counters", "divisor")


@triton.jit
def _place_of(x_pointer, addresses, sizes, places, size, chunk, many: tl.constexpr):
    """Return the address of a program's tensor, and the first element and the end of its chunk."""
    program = tl.program_id(0)
    if many:
        place = tl.load(places + program)
        tensor = place >> 32
        values = tl.load(addresses + tensor).to(x_pointer.dtype)
        end = tl.load(sizes + tensor)
        start = (place & 0xFFFFFFFF) * chunk
    else:
        values = x_pointer
        end = size.to(tl.int64)
        start = program.to(tl.int64) * chunk
    return values, start, tl.minimum(end, start + chunk)


@triton.jit
def _add_lanes(x, inside, low, high, total, squares, zeros, eps, accumulator: tl.constexpr):
    """Add the elements `inside` to the sums of their lanes; the others are 0."""
    wide = x.to(accumulator)
    low = tl.minimum(low, tl.where(inside, x, float("inf")))
    high = tl.maximum(high, tl.where(inside, x, float("-inf")))
    zeros += (inside & (tl.abs(x) <= eps)).to(tl.int32)
    return low, high, total + wide, squares + wide * wide, zeros


@triton.jit
def _read_finite(
    values,
    start,
    stop,
    eps,
    accumulator: tl.constexpr,
    lanes: tl.constexpr,
    unroll: tl.constexpr,
    alignment: tl.constexpr,
):
    """Return the min, max, sum, sum of squares and number of zeros of a chunk, which are right if all is finite.

    The sum of squares tells: of finite float32 values it is finite in float64. The main loop loads from an address
    that is a multiple of `alignment` bytes and says so, for then as many are loaded at once.
    """
    low = tl.full([lanes], float("inf"), tl.float32)
    high = tl.full([lanes], float("-inf"), tl.float32)
    total = tl.zeros([lanes], accumulator)
    squares = tl.zeros([lanes], accumulator)
    zeros = tl.zeros([lanes], tl.int32)
    lane = tl.arange(0, lanes)
    width: tl.constexpr = values.dtype.element_ty.primitive_bitwidth // 8
    past = (values + start).to(tl.int64) & (alignment - 1)
    head = tl.minimum(((alignment - past) & (alignment - 1)) // width, stop - start).to(tl.int32)
    inside = lane < head
    first = tl.load(values + start + lane, mask=inside, other=0.0).to(tl.float32)
    low, high, total, squares, zeros = _add_lanes(first, inside, low, high, total, squares, zeros, eps, accumulator)

    aligned = tl.multiple_of(values + start + head, alignment)
    count = (stop - start).to(tl.int32) - head
    full = count // (lanes * unroll) * (lanes * unroll)
    for at in tl.range(0, full, lanes * unroll, num_stages=3):
        offsets = tl.multiple_of(at, 16) + tl.arange(0, unroll)[:, None] * lanes + lane[None, :]
        x = tl.load(aligned + offsets).to(tl.float32)
        wide = x.to(accumulator)
        low = tl.minimum(low, tl.min(x, 0))
        high = tl.maximum(high, tl.max(x, 0))
        total += tl.sum(wide, 0)
        squares += tl.sum(wide * wide, 0)
        zeros += tl.sum((tl.abs(x) <= eps).to(tl.int32), 0)
    for at in range(full, count, lanes):
        within = at + lane < count
        last = tl.load(aligned + at + lane, mask=within, other=0.0).to(tl.float32)
        low, high, total, squares, zeros = _add_lanes(last, within, low, high, total, squares, zeros, eps, accumulator)
    return tl.min(low), tl.max(high), tl.sum(total), tl.sum(squares), tl.sum(zeros)


@triton.jit
def _split_of(x, finite, magnitude, accumulator: tl.constexpr):
    """Return the terms of the sums: values up to large, large ones scaled down, small ones scaled up, and the rest."""
    large = finite & (magnitude > _LARGE)
    small = finite & (magnitude < _SMALL)
    usual = tl.where(finite & (magnitude <= _LARGE), x, 0.0)
    down = tl.where(large, x * _DOWN, 0.0)
    up = tl.where(small, x * _UP, 0.0)
    middle = tl.where(magnitude >= _SMALL, usual, 0.0)
    return usual.to(accumulator), down.to(accumulator), up.to(accumulator), middle.to(accumulator)


@triton.jit
def _norm_of_split(large, usual, small):
    below = tl.where(usual > 0, tl.sqrt(usual + small * _DOWN * _DOWN), tl.sqrt(small) * _DOWN)
    return tl.where(large > 0, tl.sqrt(large + usual * _DOWN * _DOWN) * _UP, below)


@triton.jit
def _read_any(values, start, stop, eps, row, split: tl.constexpr, accumulator: tl.constexpr, lanes: tl.constexpr):
    """Write the partial row of a chunk that may hold NaN and Inf, or whose sums need to be split."""
    low = tl.full([lanes], float("inf"), tl.float32)
    high = tl.full([lanes], float("-inf"), tl.float32)
    total = tl.zeros([lanes], accumulator)
    squares = tl.zeros([lanes], accumulator)
    total_large = tl.zeros([lanes], accumulator)
    squares_small = tl.zeros([lanes], accumulator)
    squares_large = tl.zeros([lanes], accumulator)
    nans = tl.zeros([lanes], tl.int32)
    infs = tl.zeros([lanes], tl.int32)
    zeros = tl.zeros([lanes], tl.int32)
    for at in range(0, stop - start, lanes):
        offsets = start + at + tl.arange(0, lanes)
        inside = offsets < stop
        x = tl.load(values + offsets, mask=inside, other=float("nan")).to(tl.float32)
        magnitude = tl.abs(x)
        finite = magnitude < float("inf")  # false for NaN, so that lanes outside the chunk add nothing
        low = tl.minimum(low, tl.where(finite, x, float("inf")))
        high = tl.maximum(high, tl.where(finite, x, float("-inf")))
        nans += (inside & (x != x)).to(tl.int32)
        infs += (magnitude == float("inf")).to(tl.int32)
        zeros += (magnitude <= eps).to(tl.int32)
        if split:
            usual, down, up, middle = _split_of(x, finite, magnitude, accumulator)
            total += usual
            total_large += down
            squares_large += down * down
            squares_small += up * up
            squares += middle * middle
        else:
            wide = tl.where(finite, x, 0.0).to(accumulator)
            total += wide
            squares += wide * wide
    tl.store(row + _MIN, tl.min(low).to(accumulator))
    tl.store(row + _MAX, tl.max(high).to(accumulator))
    tl.store(row + _SUM, tl.sum(total))
    tl.store(row + _SUM_LARGE, tl.sum(total_large))
    tl.store(row + _SQUARES_SMALL, tl.sum(squares_small))
    tl.store(row + _SQUARES, tl.sum(squares))
    tl.store(row + _SQUARES_LARGE, tl.sum(squares_large))
    tl.store(row + _NANS, tl.sum(nans).to(accumulator))
    tl.store(row + _INFS, tl.sum(infs).to(accumulator))
    tl.store(row + _ZEROS, tl.sum(zeros).to(accumulator))


@triton.jit
def _read_whole(values, start, stop, eps, row, accumulator: tl.constexpr, lanes: tl.constexpr):
    """Write the partial row of a chunk of whole numbers, of which none is NaN or Inf."""
    low = tl.full([lanes], float("inf"), accumulator)
    high = tl.full([lanes], float("-inf"), accumulator)
    total = tl.zeros([lanes], accumulator)
    squares = tl.zeros([lanes], accumulator)
    zeros = tl.zeros([lanes], tl.int32)
    for at in range(0, stop - start, lanes):
        offsets = start + at + tl.arange(0, lanes)
        inside = offsets < stop
        x = tl.load(values + offsets, mask=inside, other=0).to(accumulator)
        low, high, total, squares, zeros = _add_lanes(x, inside, low, high, total, squares, zeros, eps, accumulator)
    _store_finite(row, tl.min(low), tl.max(high), tl.sum(total), tl.sum(squares), tl.sum(zeros), accumulator)


@triton.jit
def _store_finite(row, low, high, total, squares, zeros, accumulator: tl.constexpr):
    """Write the partial row of a chunk whose values are all finite."""
    tl.store(row + _MIN, low.to(accumulator))
    tl.store(row + _MAX, high.to(accumulator))
    tl.store(row + _SUM, total)
    tl.store(row + _SQUARES, squares)
    tl.store(row + _NANS, 0.0)
    tl.store(row + _INFS, 0.0)
    tl.store(row + _ZEROS, zeros.to(accumulator))


@triton.jit
def _count_values(values, start, stop, counts, divisor, lanes: tl.constexpr):
    """Add a chunk's values divided by `divisor` to the counters of its tensor; see `collectors/histogram.py`.

    The chunk was read just before, so most of it comes out of the device's cache.
    """
    found = tl.zeros([_SLOTS], tl.int32)
    for at in range(0, stop - start, lanes):
        offsets = start + at + tl.arange(0, lanes)
        inside = offsets < stop
        x = tl.where(inside, tl.load(values + offsets, mask=inside, other=0).to(tl.float32), float("nan"))
        scaled = x / divisor
        finite = tl.abs(x) < float("inf")
        x = tl.where(finite & (tl.abs(scaled) == float("inf")), tl.where(scaled > 0, _LARGEST, -_LARGEST), scaled)
        bits = x.to(tl.int32, bitcast=True)
        key = (bits >> 21) & 1023
        octave = key >> 2
        number = tl.where(octave >= 103, key - 331, tl.maximum(octave - 22, 0))
        number = tl.where(octave >= 143, tl.minimum(octave + 98, _MIDDLE), number)
        slot = tl.where(bits < 0, _MIDDLE - number, _MIDDLE + number)
        found += tl.histogram(tl.where(key >= 1020, _SLOTS - 1, slot), _SLOTS)
    lane = tl.arange(0, _SLOTS)
    tl.atomic_add(counts + lane, found, mask=found > 0)


# Not specialised: Triton would make a size of 1 a constant, and compile anew for some other values. Nor for alignment:
# tables lie anywhere in their block, and a training would wait for the compiler where one lies differently for once.
@triton.jit(do_not_specialize=["first", "size", "chunk", "slot"], do_not_specialize_on_alignment=POINTERS)
def partial_rows(
    x_pointer,
    addresses,
    sizes,
    places,
    slots,
    partials,
    counters,
    divisor,
    first,
    size,
    chunk,
    slot,
    eps,
    many: tl.constexpr,
    histograms: tl.constexpr,
    split: tl.constexpr,
    accumulator: tl.constexpr,
    lanes: tl.constexpr,
    unroll: tl.constexpr,
    alignment: tl.constexpr,
):
    """Write the partial row of one chunk: chunk `program_id` of one tensor, or with `many` a chunk of one of many.

    `places` gives each program the number of its tensor (upper 32 bits) and of its chunk (lower 32 bits). With
    `histograms` the chunk's values are added to the counters of row `slot`, or of the tensor's row in `slots`.
    """
    program = tl.program_id(0)
    values, start, stop = _place_of(x_pointer, addresses, sizes, places, size, chunk, many)
    row = partials + (first + program).to(tl.int64) * _COLUMNS
    if x_pointer.dtype.element_ty.is_int():
        _read_whole(values, start, stop, eps, row, accumulator, lanes)
    elif split:
        _read_any(values, start, stop, eps, row, split, accumulator, lanes)
    else:
        low, high, total, squares, zeros = _read_finite(values, start, stop, eps, accumulator, lanes, unroll, alignment)
        if squares < float("inf"):
            _store_finite(row, low, high, total, squares, zeros, accumulator)
        else:
            _read_any(values, start, stop, eps, row, split, accumulator, lanes)
    if histograms:
        to = tl.load(slots + (tl.load(places + program) >> 32)) if many else slot.to(tl.int64)
        _count_values(values, start, stop, counters + to * _SLOTS, tl.load(divisor), lanes)


@triton.jit(do_not_specialize_on_alignment=["partials", "firsts", "counts", "sizes", "slots", "rows"])
def combine_rows(
    partials,
    firsts,
    counts,
    sizes,
    slots,
    rows,
    split: tl.constexpr,
    accumulator: tl.constexpr,
    block: tl.constexpr,
):
    """Write row `slots[program_id]` from the partial rows of one tensor."""
    program = tl.program_id(0)
    first = tl.load(firsts + program)
    count = tl.load(counts + program)
    size = tl.load(sizes + program).to(accumulator)
    low = tl.full([block], float("inf"), accumulator)
    high = tl.full([block], float("-inf"), accumulator)
    total = tl.zeros([block], accumulator)
    total_large = tl.zeros([block], accumulator)
    squares_small = tl.zeros([block], accumulator)
    squares = tl.zeros([block], accumulator)
    squares_large = tl.zeros([block], accumulator)
    nans = tl.zeros([block], accumulator)
    infs = tl.zeros([block], accumulator)
    zeros = tl.zeros([block], accumulator)
    for at in range(0, count, block):
        index = at + tl.arange(0, block)
        inside = index < count
        row = partials + (first + index).to(tl.int64) * _COLUMNS
        low = tl.minimum(low, tl.load(row + _MIN, mask=inside, other=float("inf")))
        high = tl.maximum(high, tl.load(row + _MAX, mask=inside, other=float("-inf")))
        total += tl.load(row + _SUM, mask=inside, other=0.0)
        squares += tl.load(row + _SQUARES, mask=inside, other=0.0)
        if split:
            total_large += tl.load(row + _SUM_LARGE, mask=inside, other=0.0)
            squares_small += tl.load(row + _SQUARES_SMALL, mask=inside, other=0.0)
            squares_large += tl.load(row + _SQUARES_LARGE, mask=inside, other=0.0)
        nans += tl.load(row + _NANS, mask=inside, other=0.0)
        infs += tl.load(row + _INFS, mask=inside, other=0.0)
        zeros += tl.load(row + _ZEROS, mask=inside, other=0.0)
    bad, infinite = tl.sum(nans), tl.sum(infs)
    finite = size - bad - infinite
    some = finite > 0
    nothing = float("nan")
    mean = tl.sum(total) / finite
    norm = tl.sqrt(tl.sum(squares))
    if split:
        mean += tl.sum(total_large) / finite * _UP
        norm = _norm_of_split(tl.sum(squares_large), tl.sum(squares), tl.sum(squares_small))
    to = rows + tl.load(slots + program) * _ROW
    tl.store(to + 0, tl.where(some, tl.min(low), nothing))
    tl.store(to + 1, tl.where(some, tl.max(high), nothing))
    tl.store(to + 2, tl.where(some, mean, nothing))
    tl.store(to + 3, norm)
    tl.store(to + 4, bad)
    tl.store(to + 5, infinite)
    tl.store(to + 6, tl.where(size > 0, tl.sum(zeros) / size, nothing))
    tl.store(to + 7, nothing)
