"""Every number of an optimizer's groups is read when it changes, and never by waiting for a device."""

import copy

import pytest
import torch
from torch import nn

from trainsentry.collectors.series import NO_OPTION, SeriesTable
from trainsentry.collectors.statistics import VALUE
from trainsentry.collectors.torch.parameters.options import MOST_GROUPS, OptionReader, options_of
from trainsentry.collectors.torch.rows.step_rows import StepRows


def reader():
    """Return an option reader, and what returns the rows that it has appended since the last call."""
    rows = StepRows(SeriesTable(), 0.0)

    def new():
        taken = rows.take()
        return {rows.table.series[i].name: float(row[VALUE]) for i, row in zip(taken.ids, taken.values, strict=True)}

    return OptionReader(rows), new


def groups(n=2):
    return [{"params": [nn.Parameter(torch.ones(2))], "weight_decay": 0.1 * i} for i in range(n)]


def test_the_first_step_has_all_numbers_and_later_ones_what_changed():
    options, new = reader()
    adam = torch.optim.AdamW(groups(), lr=1e-3)
    options.read(adam)
    first = new()
    assert first["option.0.0.lr"] == 1e-3
    assert first["option.0.1.weight_decay"] == 0.1
    assert (first["option.0.0.betas.0"], first["option.0.0.betas.1"]) == (0.9, 0.999)
    options.read(adam)
    assert new() == {}
    adam.param_groups[1]["lr"] = 2e-3
    adam.param_groups[0]["maximize"] = True
    adam.param_groups[0]["mine"] = 7
    options.read(adam)
    assert new() == {"option.0.1.lr": 2e-3, "option.0.0.maximize": 1.0, "option.0.0.mine": 7.0}


def test_a_loaded_checkpoint_and_a_wrapper_that_shows_one_group_change_no_number():
    options, new = reader()
    adam = torch.optim.AdamW(groups(), lr=1e-3)
    options.read(adam)
    new()
    adam.load_state_dict(copy.deepcopy(adam.state_dict()))
    options.read(adam)
    whole = adam.param_groups
    for group in whole:
        adam.param_groups = [group]
        options.read(adam)
    assert new() == {}


class Own(torch.optim.SGD):
    """An optimizer whose step is its own."""

    def step(self, closure=None):
        return super().step(closure)


class Compiled(torch.optim.SGD):
    """An optimizer whose step does not say where it was written."""

    def __init__(self, *given, **settings):
        super().__init__(*given, **settings)
        type(self).step = dict.update


TORCHS_OWN = [one for one in vars(torch.optim).values() if isinstance(one, type) and one is not torch.optim.Optimizer]


@pytest.mark.parametrize("make", [*TORCHS_OWN, Own, Compiled], ids=lambda make: make.__name__)
def test_an_optimizer_with_a_step_of_its_own_is_told_once(make):
    options, new = reader()
    weights = torch.nn.Linear(2, 2).parameters()
    optimizer = make([p for p in weights if p.ndim == 2], lr=1e-3)
    options.read(optimizer)
    assert new().get("own_step.0") == (1.0 if make in (Own, Compiled) else None)
    options.read(optimizer)
    assert new() == {}


def test_a_rate_in_a_tensor_is_read_in_host_memory_alone():
    assert dict(options_of({"lr": torch.tensor(0.5)})) == {"lr": 0.5}
    assert dict(options_of({"lr": torch.empty((), device="meta"), "name": "x", "foreach": None})) == {}


def test_a_second_optimizer_has_numbers_of_its_own_and_groups_are_bounded():
    options, new = reader()
    options.read(torch.optim.SGD(groups(1), lr=0.1))
    sgd = torch.optim.SGD(groups(MOST_GROUPS + 3), lr=0.2)
    options.read(sgd)
    rates = {name: value for name, value in new().items() if name.endswith(".lr")}
    assert rates["option.0.0.lr"] == 0.1
    assert rates["option.1.0.lr"] == 0.2
    assert len(rates) == 1 + MOST_GROUPS


def test_numbers_that_the_step_of_an_optimizer_writes_are_its_state_and_no_options():
    class Estimating(torch.optim.SGD):
        """Estimates a distance, as Prodigy does, and sets its rate by it."""

        def step(self, closure=None):
            for group in self.param_groups:
                group["distance"] = group.get("distance", 1.0) * 1.5
                group["lr"] = group["distance"] * 1e-3
            return super().step(closure)

    options, new = reader()
    sgd = Estimating(groups(), lr=1e-3)
    for group in sgd.param_groups:
        group["distance"], group["mine"] = 1.0, 7.0
    options.read(sgd)
    new()
    sgd.step()
    options.updated(sgd)
    assert new() == {"option.0.0.distance": NO_OPTION, "option.0.1.distance": NO_OPTION}
    found = set()
    for step in range(4):
        sgd.param_groups[0]["mine"] = float(step)  # by the loop
        options.read(sgd)
        found |= set(new())
        sgd.step()
        options.updated(sgd)
    assert found == {"option.0.0.lr", "option.0.1.lr", "option.0.0.mine"}
