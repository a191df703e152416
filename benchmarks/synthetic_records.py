"""Makes step records of synthetic series: correlated noise with heavy tails, on a log scale."""

import numpy as np

from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import ACTIVATION_OUTPUT, GRADIENT, PARAMETER, UPDATE, Layout, Series, SeriesTable
from trainsentry.collectors.statistics import COLUMNS, INFS, MAX, MEAN, MIN, NANS, NORM, VALUE, ZEROS

QUANTITIES = (GRADIENT, PARAMETER, UPDATE, ACTIVATION_OUTPUT)
SCALARS = ("loss", "grad_norm")


class Stream:
    """`count` series of four quantities, and two scalars; noise is Student's t of four degrees of freedom.

    A fifth of its variance is common to all series of a quantity; its autocorrelation is 0.5 from step to step; scales
    differ threefold between series. `deviation` is that of the scalars, on a log scale.
    """

    def __init__(self, count: int, seed: int, deviation: float = 0.2) -> None:
        self.random = np.random.default_rng(seed)
        self.table = SeriesTable()
        self.count = count
        names = [Series(f"layer{i // 4}.weight", QUANTITIES[i % 4], module=f"layer{i // 4}") for i in range(count)]
        names += [Series(name, name, scalar=True) for name in SCALARS]
        self.ids = np.array([self.table.series_id(s) for s in names], np.int32)
        self.layouts = np.full(len(names), self.table.layout_id(Layout((64, 64), "float32", 4096)), np.int32)
        self.level = self.random.normal(0, 2, len(names))
        self.scale = np.append(deviation * 3 ** self.random.uniform(-0.5, 0.5, count), [deviation] * len(SCALARS))
        self.state = np.zeros(len(names))
        self.kind = np.append(np.arange(count) % 4, [4, 5])
        self.step = 0

    def sizes(self) -> np.ndarray:
        """Return the next step's value of each series."""
        noise = self.random.standard_t(4, len(self.ids)) / 2**0.5  # of variance one
        common = self.random.standard_t(4, 6) / 2**0.5
        fresh = 0.8**0.5 * noise + 0.2**0.5 * common[self.kind]
        self.state = 0.5 * self.state + 0.75**0.5 * fresh
        return np.exp(self.level + self.scale * self.state)

    def record(self, sizes: np.ndarray) -> StepRecord:
        """Return a record with these values as norms."""
        values = np.zeros((len(self.ids), COLUMNS))
        values[:, NORM] = sizes
        values[:, MAX], values[:, MIN] = sizes / 16, -sizes / 16
        values[:, MEAN] = values[:, ZEROS] = values[:, NANS] = values[:, INFS] = 0.0
        values[:, VALUE] = np.nan
        values[self.count :, VALUE] = sizes[self.count :]
        self.step += 1
        return StepRecord(self.step - 1, 0, self.ids, self.layouts, values, time=float(self.step))
