"""Numbers as text that reads back exactly, many at a time."""

from itertools import groupby
from typing import Final

import numpy as np
import numpy.typing as npt
import orjson

from trainsentry.exporters.csv.format import format_value

_NUMPY: Final = orjson.OPT_SERIALIZE_NUMPY


def row_texts(values: npt.NDArray[np.float64], counts: tuple[bool, ...]) -> list[str]:
    """Return each row of `values`, shape (rows, columns), as text with commas between the numbers.

    A number reads back to the same float64; the columns of `counts` are whole numbers, without a decimal point.

    >>> row_texts(np.array([[0.1, 2.0], [np.nan, 0.0]]), (False, True))
    ['0.1,2', 'nan,0']
    """
    if not len(values) or not counts:
        return [""] * len(values)
    finite = np.isfinite(values)
    whole = bool(finite.all())
    known = values if whole else np.where(finite, values, 0.0)
    groups = [(count, [i for i, _ in items]) for count, items in groupby(enumerate(counts), key=lambda item: item[1])]
    parts = [_texts(known[:, columns].astype(np.int64) if count else known[:, columns]) for count, columns in groups]
    texts = parts[0] if len(parts) == 1 else [",".join(row) for row in zip(*parts, strict=True)]
    if not whole:
        for row in np.flatnonzero(~finite.all(axis=1)).tolist():
            numbers = zip(values[row].tolist(), counts, strict=True)
            texts[row] = ",".join(_text(value, count) for value, count in numbers)
    return texts


def _texts(values: npt.NDArray[np.float64] | npt.NDArray[np.int64]) -> list[str]:
    """Return the rows of a matrix of finite numbers; JSON's text of a number is the shortest that reads back."""
    return orjson.dumps(np.ascontiguousarray(values), option=_NUMPY)[2:-2].decode().split("],[")


def _text(value: float, count: bool) -> str:
    return format_value(value, count=count and np.isfinite(value))
