"""Builds step records for tests of detection, without any framework."""

import numpy as np

from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import Layout, Series, SeriesTable
from trainsentry.collectors.statistics import COLUMNS, INFS, MAX, MEAN, MIN, NANS, NORM, VALUE, ZEROS


class Records:
    """Makes records of a few series: `step(n, {(name, quantity): size})`."""

    def __init__(self, dtype="float32", rank=0):
        self.table = SeriesTable()
        self.layout = self.table.layout_id(Layout((16,), dtype, 16))
        self.rank = rank

    def step(self, number, sizes, **flags):
        """Return a record: a size is the norm; `nan` and `inf` stand for one such element among good ones."""
        ids, values = [], []
        for (name, quantity, *micro), size in sizes.items():
            scalar = name == quantity
            is_activation = quantity.startswith("activation")
            cut = ".output" if ".output" in name else ".input"
            module = name.rpartition(cut)[0] if is_activation else name.rpartition(".")[0]
            series = Series(name, quantity, micro[0] if micro else 0, module=module, scalar=scalar)
            ids.append(self.table.series_id(series))
            values.append(self.row(size, scalar))
            values[-1][MIN] *= quantity != "exp_avg_sq"  # squares
        n = len(ids)
        return StepRecord(
            number,
            self.rank,
            np.asarray(ids, np.int32),
            np.full(n, self.layout, np.int32),
            np.asarray(values).reshape(n, COLUMNS),
            **flags,
        )

    @staticmethod
    def row(size, scalar):
        row = np.zeros(COLUMNS)
        finite = size if np.isfinite(size) else 1.0
        row[[MIN, MAX, MEAN, NORM]] = -finite / 2, finite / 2, 0.0, finite
        row[NANS], row[INFS], row[ZEROS], row[VALUE] = np.isnan(size), np.isinf(size), 0.0, np.nan
        if scalar:
            row[[MIN, MAX, MEAN]] = finite if np.isfinite(size) else np.nan
            row[VALUE] = size
        return row


def resolved(rows):
    """Take the rows of a `StepRows`, wait for their copies, and return each series' statistics by its id."""
    pending = rows.take()
    pending.wait()
    ids, _, values = pending.resolve()
    return dict(zip(ids.tolist(), values, strict=True))
