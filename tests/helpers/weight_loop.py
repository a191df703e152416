"""A training loop whose writes to weights are counted as `TorchWatch` does it."""

import torch
from torch import nn

from trainsentry.collectors.series import SeriesTable
from trainsentry.collectors.statistics import VALUE
from trainsentry.collectors.torch.parameters.gradients import OptimizedParameters
from trainsentry.collectors.torch.parameters.weight_writes import WeightWrites
from trainsentry.collectors.torch.rows.step_rows import StepRows
from trainsentry.collectors.torch.sharding.model_names import ModelNames


def told_by(rows):
    """Take the rows of a step; return what scalars say, by their names."""
    taken = rows.take()
    return {rows.table.series[i].name: float(v[VALUE]) for i, v in zip(taken.ids, taken.values, strict=True)}


class WeightLoop:
    """Trains a small model; its optimizer may be kept from writing, and something else may write."""

    def __init__(self, make, *layers):
        torch.manual_seed(0)
        self.model = nn.Sequential(*layers) if layers else nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        self.optimizer = make(list(self.model.parameters()))
        self.table = SeriesTable()
        self.rows = StepRows(self.table, 0.0)
        self.writes, names = WeightWrites(self.rows, self.model.parameters), ModelNames()
        names.add([self.model], [self.optimizer])
        self.optimized = OptimizedParameters(names, {})

    def step(self, write=lambda _: None, *, updates=True, backward=True):
        """Train a step, after a write to the model; return what was told."""
        with torch.no_grad():
            write(self.model)
        if backward:
            self.model(torch.randn(3, 4)).square().mean().backward()
        self.writes.begin(self.optimizer, self.optimized.owned("", self.optimizer))
        if updates:
            self.optimizer.step()
        self.writes.updated(self.optimizer)
        self.optimizer.zero_grad()
        return told_by(self.rows)
