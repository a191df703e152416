"""Numbers of modules have a row when they change, and only then."""

from types import SimpleNamespace

import pytest
from torch import nn

from trainsentry.collectors.series import SeriesTable
from trainsentry.collectors.shared.scalar_rows import ModuleSettings
from trainsentry.collectors.statistics import MIN, VALUE
from trainsentry.collectors.torch.rows.step_rows import StepRows


class Router(nn.Module):
    """A user's module: it keeps a capacity, a best loss of its own, and things that are no settings."""

    def __init__(self):
        super().__init__()
        self.capacity, self.calls, self.name, self._hidden = 1.25, 3, "router", 0.5
        self.norm, self.drop = nn.LayerNorm(4), nn.Dropout(0.1)


@pytest.fixture
def watched():
    """Return a model, and what returns the changes since the last call: {name: (before, now)}."""
    model = Router()
    named = [SimpleNamespace(name=name, module=module, vpp_stage=0) for name, module in model.named_modules()]
    rows = StepRows(SeriesTable(), 0.0)
    settings = ModuleSettings(SimpleNamespace(modules=named), rows)

    def read():
        settings.read()
        taken = rows.take()
        names = [rows.table.series[i].name for i in taken.ids]
        return {n: (r[MIN], r[VALUE]) for n, r in zip(names, taken.values, strict=True)}

    assert read() == {}
    return model, read, named


def test_a_changed_number_has_one_row_with_both_values(watched):
    model, read, _ = watched
    assert read() == {}
    model.norm.eps, model.capacity = 0.5, 0.25
    changed = {"setting.norm.eps": (1e-5, 0.5), "setting.model.capacity": (1.25, 0.25)}
    assert read() == {"setting_before.norm.eps": (1e-5, 1e-5), **changed}, "only the framework's own has two"
    assert read() == {}


def test_counters_names_hidden_numbers_and_removed_ones_are_no_settings(watched):
    model, read, _ = watched
    model.calls, model.name, model._hidden = 4, "other", 0.7
    assert read() == {}
    del model.capacity
    assert read() == {}


def test_modules_that_come_later_change_nothing(watched):
    model, read, named = watched
    model.drop.p = 0.5
    named.append(SimpleNamespace(name="late", module=nn.Dropout(0.3), vpp_stage=0))
    assert read() == {}
    named[-1].module.p = 0.0
    assert read() == {"setting_before.late.p": (0.3, 0.3), "setting.late.p": (0.3, 0.0)}
