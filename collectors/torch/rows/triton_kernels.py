"""Triton kernels that compute all statistics of a tensor, or of a list of tensors, in one read.

In `partial_rows`, one program reads each chunk of a tensor and writes a partial row. `combine_rows` combines a tensor's
partial rows into one row. No program waits for another and nothing is added atomically, so results are reproducible.

Where the device has float64, squares of narrower floats are summed directly in float64. Elsewhere (`split`), sums and
squares are kept apart for large, usual and small magnitudes, each scaled so that none overflows or underflows: Blue's
algorithm (J. L. Blue, A portable Fortran program to find the Euclidean norm of a vector, ACM TOMS 4, 1978).
"""

# Triton reads annotations as part of its own language, so the kernels' arguments have none.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

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

_LARGE = tl.constexpr(2.0**40)
_SMALL = tl.constexpr(2.0**-40)
_DOWN = tl.constexpr(2.0**-90)
_UP = tl.constexpr(2.0**90)


@triton.jit
def _place_of(x_pointer, addresses, sizes, tensor_of, chunk_of, size, chunk, many: tl.constexpr):
    """Return the address of a program's tensor, and the first element and the end of its chunk."""
    program = tl.program_id(0)
    if many:
        tensor = tl.load(tensor_of + program)
        values = tl.load(addresses + tensor).to(x_pointer.dtype)
        end = tl.load(sizes + tensor)
        start = tl.load(chunk_of + program).to(tl.int64) * chunk
    else:
        values = x_pointer
        end = size.to(tl.int64)
        start = program.to(tl.int64) * chunk
    return values, start, tl.minimum(end, start + chunk)


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
def _store_partial(
    row,
    low,
    high,
    total,
    total_large,
    squares_small,
    squares,
    squares_large,
    nans,
    infs,
    zeros,
    accumulator: tl.constexpr,
):
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


# Not specialised: Triton would make a size of 1 a constant, and compile anew for some other values.
@triton.jit(do_not_specialize=["first", "size", "chunk"])
def partial_rows(
    x_pointer,
    addresses,
    sizes,
    tensor_of,
    chunk_of,
    partials,
    first,
    size,
    chunk,
    eps,
    many: tl.constexpr,
    split: tl.constexpr,
    accumulator: tl.constexpr,
    block: tl.constexpr,
):
    """Write the partial row of one chunk: chunk `program_id` of one tensor, or with `many` a chunk of one of many."""
    program = tl.program_id(0)
    values, start, end = _place_of(x_pointer, addresses, sizes, tensor_of, chunk_of, size, chunk, many)
    low = tl.full([block], float("inf"), tl.float32)
    high = tl.full([block], float("-inf"), tl.float32)
    total = tl.zeros([block], accumulator)
    squares = tl.zeros([block], accumulator)
    total_large = tl.zeros([block], accumulator)
    squares_small = tl.zeros([block], accumulator)
    squares_large = tl.zeros([block], accumulator)
    nans = tl.zeros([block], tl.int32)
    infs = tl.zeros([block], tl.int32)
    zeros = tl.zeros([block], tl.int32)
    for at in range(0, end - start, block):
        offsets = start + at + tl.arange(0, block)
        inside = offsets < end
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

    row = partials + (first + program).to(tl.int64) * _COLUMNS
    _store_partial(
        row, low, high, total, total_large, squares_small, squares, squares_large, nans, infs, zeros, accumulator
    )


@triton.jit
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
