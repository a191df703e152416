"""Defines the statistics of a tensor in NumPy, combines those of its parts exactly, and fingerprints rows.

Every faster path (host, device, fused kernels) is tested against `reference`.
"""

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

STATISTICS: Final = ("min", "max", "mean", "norm", "nans", "infs", "zeros")
"""Names of the statistics, in the order of a record's columns."""

MIN, MAX, MEAN, NORM, NANS, INFS, ZEROS, VALUE = range(8)
COLUMNS: Final = 8
"""Columns of a record: the seven statistics and `VALUE`.

`VALUE` holds the ratio ‖Δ‖/‖w‖ of an update, the value of a scalar, or the fingerprint of another tensor's bits (a
whole number below 2^53: XOR and sum of its words, folded), or NaN where none was computed.
"""

COUNTS: Final = frozenset({"nans", "infs"})
"""Statistics that are whole numbers."""


def reference(values: npt.ArrayLike, eps: float = 0.0) -> dict[str, float]:
    """Return the seven statistics of `values`, computed in float64.

    - `nans`, `infs`: numbers of elements that are NaN, and that are +Inf or -Inf.
    - `min`, `max`, `mean`: over the finite elements; NaN when there is none.
    - `norm`: L2 norm of the finite elements, scaled so that it does not overflow; 0 when there is none.
    - `zeros`: share of all elements with |x| <= `eps`; NaN for an empty tensor.

    Integers and bool count as numbers. A complex element counts as its magnitude, and as NaN or Inf when its real or
    imaginary part is.

    >>> reference([3.0, -4.0, float("nan")])["norm"]
    5.0
    """
    array = np.asarray(values)
    wide = np.abs(array.astype(np.complex128)) if np.iscomplexobj(array) else array.astype(np.float64)
    nans, infs = np.isnan(wide), np.isinf(wide)
    finite = wide[~(nans | infs)]
    size = wide.size
    largest = float(np.abs(finite).max()) if finite.size else 0.0
    scale = largest or 1.0
    with np.errstate(under="ignore"):
        scaled = finite / scale
        norm = scale * float(np.sqrt(np.sum(scaled * scaled)))
    return {
        "min": float(finite.min()) if finite.size else np.nan,
        "max": float(finite.max()) if finite.size else np.nan,
        "mean": scale * float(np.sum(scaled)) / finite.size if finite.size else np.nan,
        "norm": norm,
        "nans": float(np.count_nonzero(nans)),
        "infs": float(np.count_nonzero(infs)),
        "zeros": float(np.count_nonzero(np.abs(wide) <= eps)) / size if size else np.nan,
    }


BLOCK: Final = 65_536
"""Elements widened to float64 at a time: half a megabyte."""


def row_of_array(array: npt.NDArray[Any], eps: float = 0.0) -> npt.NDArray[np.float64]:
    """Return the statistics of a non-empty floating-point array, shape (COLUMNS,).

    >>> row_of_array(np.array([3.0, -4.0], np.float32)).tolist()[:4]
    [-4.0, 3.0, -0.5, 5.0]
    """
    flat = array.reshape(-1)
    total = squares = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, flat.size, BLOCK):
            wide = flat[start : start + BLOCK].astype(np.float64)
            total += float(wide.sum())
            squares += float(wide @ wide)
    if not 1e-280 < squares < 1e290 or not math.isfinite(total):  # not finite, all zeros, or doubles out of range
        return np.asarray([*reference(flat, eps).values(), math.nan])
    above = np.count_nonzero(flat) if eps == 0.0 else np.count_nonzero(np.abs(flat.astype(np.float64)) > eps)
    zeros = (flat.size - above) / flat.size
    low, high = float(flat.min()), float(flat.max())
    return np.asarray([low, high, total / flat.size, math.sqrt(squares), 0.0, 0.0, zeros, math.nan])


Floats = npt.NDArray[np.float64]


def combine(
    values: Floats, numel: npt.NDArray[np.int64], starts: npt.NDArray[np.intp], ratios: npt.NDArray[np.bool_]
) -> Floats:
    """Combine the statistics of parts in consecutive rows into those of whole tensors, shape (groups, COLUMNS).

    `values` has shape (n, COLUMNS) and `numel` (n,) counts each part's elements; group i begins at row `starts[i]`.
    Where `ratios`, of shape (groups,), is set, the value column holds ‖Δ‖/‖w‖ of each part and becomes that of the
    whole; elsewhere it becomes NaN.

    >>> parts = np.array([[-1.0, 3.0, 1.0, 3.0, 0, 0, 0.0, np.nan], [0.0, 0.0, 0.0, 0.0, 1, 0, 0.5, np.nan]])
    >>> combine(parts, np.array([4, 2]), np.array([0]), np.array([False]))[0, :7].round(3).tolist()
    [-1.0, 3.0, 0.8, 3.0, 1.0, 0.0, 0.167]
    """
    whole = np.full((len(starts), COLUMNS), np.nan)
    if not len(starts):
        return whole
    whole[:, MIN] = np.fmin.reduceat(values[:, MIN], starts)
    whole[:, MAX] = np.fmax.reduceat(values[:, MAX], starts)
    for count in (NANS, INFS):
        whole[:, count] = np.add.reduceat(values[:, count], starts)
    size = np.add.reduceat(numel, starts)
    finite = numel - values[:, NANS] - values[:, INFS]
    with np.errstate(divide="ignore", invalid="ignore"):
        # Weighted by shares, so that large element counts cannot overflow.
        shares = finite / np.repeat(np.add.reduceat(finite, starts), _lengths(starts, len(values)))
        means = np.where(finite > 0, values[:, MEAN] * shares, 0.0)
        whole[:, MEAN] = np.where(np.add.reduceat(finite, starts) > 0, np.add.reduceat(means, starts), np.nan)
        zeros = np.where(numel > 0, np.rint(values[:, ZEROS] * numel), 0.0)
        whole[:, ZEROS] = np.add.reduceat(zeros, starts) / size
    whole[:, NORM] = _norms(values[:, NORM], starts)
    if ratios.any():
        whole[:, VALUE] = np.where(ratios, _ratios(values, whole[:, NORM], starts), np.nan)
    return whole


def _lengths(starts: npt.NDArray[np.intp], n: int) -> npt.NDArray[np.intp]:
    return np.diff(np.append(starts, n))


def _norms(norms: Floats, starts: npt.NDArray[np.intp]) -> Floats:
    """Return √Σ norm², scaled by the largest so that no square overflows."""
    largest = np.maximum.reduceat(norms, starts)
    scale: Any = np.where((largest > 0) & np.isfinite(largest), largest, 1.0)
    scaled = norms / np.repeat(scale, _lengths(starts, len(norms)))
    total: Floats = scale * np.sqrt(np.add.reduceat(scaled * scaled, starts))
    return total


def _ratios(values: Floats, norms: Floats, starts: npt.NDArray[np.intp]) -> Floats:
    """Return ‖Δ‖/‖w‖ of wholes: NaN where a part has not moved, which hides its ‖w‖; 0 where no part has."""
    ratio, norm = values[:, VALUE], values[:, NORM]
    with np.errstate(divide="ignore", invalid="ignore"):
        weights = np.where(norm > 0, norm / ratio, 0.0)  # a ratio of Inf: the weights were zero
        hidden = np.logical_or.reduceat((norm == 0) & (ratio == 0), starts)
        found = norms / _norms(np.nan_to_num(weights, posinf=0.0), starts)
    return np.where(norms == 0, 0.0, np.where(hidden, np.nan, found))


def fingerprints(values: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Return a fingerprint of each row's tensor, shape (n,): of its bits where known, else of its statistics.

    Statistics are float64 sums, which a single flipped bit changes.
    """
    bits = values[:, VALUE]
    return np.where(np.isfinite(bits), np.nan_to_num(bits).astype(np.int64), _mixed_statistics(values))


def content_fingerprints(values: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Return a fingerprint of each row's tensor, shape (n,), for rows that one process read in one way.

    Whole numbers of a small range have few XORs and sums, so their other statistics count too: two of 24,000
    micro-batches of 256 tokens of 64 kinds had the same XOR and the same sum. Ranks may read in several ways, and round
    means and norms differently.
    """
    prints: npt.NDArray[np.int64] = fingerprints(values) * _MIX[1]
    return prints + np.where(are_whole(values), _mixed_statistics(values), 0)


def are_whole(values: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Return which rows look like those of whole numbers, shape (n,): of tokens, labels, masks, one-hot vectors."""
    ends = values[:, [MIN, MAX]]
    return np.asarray((np.isfinite(ends) & (ends == np.rint(ends))).all(axis=1))


def _mixed_statistics(values: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    words = np.ascontiguousarray(values[:, :VALUE]).view(np.int64)
    mixed: npt.NDArray[np.int64] = (words * _MIX).sum(axis=1)
    return mixed ^ (mixed >> 29)


_MIX: Final = np.arange(1, 2 * VALUE, 2, dtype=np.int64) * np.int64(0x1E3779B97F4A7C15)
