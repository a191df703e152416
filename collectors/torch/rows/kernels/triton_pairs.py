"""Triton kernels that compare two lists of tensors element by element, in one read of both.

`partial_pairs` writes the sums of each chunk, `combine_pairs` the row of each pair; see `collectors/alignment.py`.
Nothing is added atomically, so results are reproducible. The device must have float64.
"""

# Triton reads annotations as part of its own language, so the kernels' arguments have none.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from typing import Final

import triton
from triton import language as tl

SUMS = 4
"""Numbers of a partial row: the sums of products and of both squares, and signs that agree minus those that do not."""

POINTERS: Final = ("first_like", "second_like", "firsts", "seconds", "sizes", "places", "partials")

_SUMS = tl.constexpr(SUMS)
_ROW = tl.constexpr(8)


# Not specialised, as in triton_kernels.py.
@triton.jit(do_not_specialize=["chunk"], do_not_specialize_on_alignment=POINTERS)
def partial_pairs(first_like, second_like, firsts, seconds, sizes, places, partials, chunk, lanes: tl.constexpr):
    """Write the sums of one chunk of one pair; `places` are those of `chunks.Cut`."""
    program = tl.program_id(0)
    place = tl.load(places + program)
    pair = place >> 32
    first = tl.load(firsts + pair).to(first_like.dtype)
    second = tl.load(seconds + pair).to(second_like.dtype)
    start = (place & 0xFFFFFFFF) * chunk
    stop = tl.minimum(tl.load(sizes + pair), start + chunk)
    dot = tl.zeros([lanes], tl.float64)
    squares = tl.zeros([lanes], tl.float64)
    others = tl.zeros([lanes], tl.float64)
    agree = tl.zeros([lanes], tl.int32)
    for at in range(0, stop - start, lanes):
        offsets = start + at + tl.arange(0, lanes)
        inside = offsets < stop
        x = tl.load(first + offsets, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(second + offsets, mask=inside, other=0.0).to(tl.float32)
        agree += (((x > 0) & (y > 0)) | ((x < 0) & (y < 0))).to(tl.int32)
        agree -= (((x > 0) & (y < 0)) | ((x < 0) & (y > 0))).to(tl.int32)
        a, b = x.to(tl.float64), y.to(tl.float64)
        dot += a * b
        squares += a * a
        others += b * b
    to = partials + program.to(tl.int64) * _SUMS
    tl.store(to + 0, tl.sum(dot))
    tl.store(to + 1, tl.sum(squares))
    tl.store(to + 2, tl.sum(others))
    tl.store(to + 3, tl.sum(agree).to(tl.float64))


@triton.jit(do_not_specialize_on_alignment=["partials", "starts", "counts", "sizes", "rows"])
def combine_pairs(partials, starts, counts, sizes, rows, block: tl.constexpr):
    """Write row `program_id` from the partial rows of one pair."""
    program = tl.program_id(0)
    start = tl.load(starts + program)
    count = tl.load(counts + program)
    size = tl.load(sizes + program).to(tl.float64)
    dot = tl.zeros([block], tl.float64)
    squares = tl.zeros([block], tl.float64)
    others = tl.zeros([block], tl.float64)
    agree = tl.zeros([block], tl.float64)
    for at in range(0, count, block):
        index = at + tl.arange(0, block)
        inside = index < count
        of = partials + (start + index) * _SUMS
        dot += tl.load(of + 0, mask=inside, other=0.0)
        squares += tl.load(of + 1, mask=inside, other=0.0)
        others += tl.load(of + 2, mask=inside, other=0.0)
        agree += tl.load(of + 3, mask=inside, other=0.0)
    nothing = float("nan")
    share = (tl.sum(agree) / size + 1) / 2
    share = tl.where(size > 0, share, nothing)
    lengths = tl.sqrt(tl.sum(squares)) * tl.sqrt(tl.sum(others))
    cosine = tl.sum(dot) / lengths
    known = (lengths > 0) & (lengths < float("inf"))
    cosine = tl.minimum(tl.maximum(cosine, -1.0), 1.0)
    to = rows + program.to(tl.int64) * _ROW
    tl.store(to + 0, share)
    tl.store(to + 1, share)
    tl.store(to + 2, share)
    tl.store(to + 3, tl.where(size > 0, share, 0.0))
    tl.store(to + 4, 0.0)
    tl.store(to + 5, 0.0)
    tl.store(to + 6, tl.where(size > 0, (share == 0).to(tl.float64), nothing))
    tl.store(to + 7, tl.where(known, cosine, nothing))
