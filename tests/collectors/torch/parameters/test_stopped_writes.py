"""What was kept up to date and is so no more is noted; what rests by its own rhythm, or is switched off, is not."""

import pytest
import torch
from torch import nn
from weight_loop import told_by

from trainsentry.collectors.series import SeriesTable
from trainsentry.collectors.torch.parameters import stopped_writes
from trainsentry.collectors.torch.parameters.stopped_writes import (
    LONGER,
    LOOK_EVERY,
    STOPPED,
    WRITTEN_BEFORE,
    StoppedTensors,
    StoppedWrites,
)
from trainsentry.collectors.torch.rows.step_rows import StepRows
from trainsentry.collectors.torch.sharding.model_names import ModelNames

LOOKS = 2_000
AT = 800


def stops(*tensors, switches=None):
    """Return which of several tensors stop: the look that tells, and that at which each was first found unwritten."""
    writes = StoppedWrites(len(tensors), STOPPED)
    found = {}
    for look in range(LOOKS):
        told = writes.after([tensor(look) for tensor in tensors], look, switches)
        for place, since in told.items():
            found.setdefault(place, []).append((look, since))
    return found


def until(end, every=1):
    return lambda look: int(look < end and look % every == 0)


def always(_):
    return 1


def test_a_tensor_that_is_written_no_more_is_told_once():
    assert stops(until(AT), always) == {0: [(AT + STOPPED, AT)]}


def test_one_with_a_rhythm_is_told_after_a_longer_rest():
    [[(look, since)]] = stops(until(AT, every=20), always).values()
    assert (look - since, since) == (LONGER * 19, AT - 20 + 1)


@pytest.mark.parametrize(
    "tensor",
    [
        always,
        lambda _: 0,
        until(WRITTEN_BEFORE - 1),
        lambda look: int(look % 20 == 0),
        lambda look: int(look % (10 if look < AT else 80) == 0),  # more and more seldom
        lambda look: int(look % 40 < 20),
        lambda look: 2 if look < AT else 1,
    ],
)
def test_what_goes_on_or_hardly_began_is_nothing(tensor):
    assert stops(tensor, always) == {}


@pytest.mark.parametrize("late", [0, 1])
def test_what_stops_as_a_switch_is_thrown_is_by_design(late):
    switch = lambda look: int(look == AT - late)  # noqa: E731
    busy = lambda look: int(look % 2 == 0)  # noqa: E731
    both = until(AT), until(AT)
    assert stops(*both, switch, always) == {}
    assert stops(*both, switch, switches=[False, False, True]) == {}
    assert set(stops(*both, busy, always)) == {0, 1}
    assert set(stops(*both, switch, switches=[False, False, False])) == {0, 1}


class Kept(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.average = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.weight = nn.Parameter(torch.zeros(4))


def told(
    change,
    begins=lambda module: None,
    updates=LOOK_EVERY * (WRITTEN_BEFORE + STOPPED + 8),
    at=LOOK_EVERY * (WRITTEN_BEFORE + 4),
):
    """Return what is told of a module whose buffer and average are written until a step, with the updates since."""
    module, rows, names = Kept(), StepRows(SeriesTable(), 0.0), ModelNames()
    names.add([nn.ModuleDict({"kept": module})], [])
    begins(module)
    kept, found = StoppedTensors(rows, names), {}
    for update in range(updates):
        with torch.no_grad():
            module.weight.add_(1.0)
            if update < at:
                module.mean.add_(1.0)
                module.average.add_(1.0)
            elif update == at:
                change(module)
        kept.read(update)
        found |= {name: update - since for name, since in told_by(rows).items()}
    return found


def test_a_buffer_that_is_made_anew_at_each_update_is_written_though_it_lies_where_an_older_one_did():
    module, rows, names = Kept(), StepRows(SeriesTable(), 0.0), ModelNames()
    names.add([module], [])
    kept, older, found = StoppedTensors(rows, names), [], {}
    for update in range(LOOK_EVERY * (WRITTEN_BEFORE + STOPPED + 8)):
        if update < LOOK_EVERY * (WRITTEN_BEFORE + 4):
            older.append(module.mean)  # so that each new one lies elsewhere
        module.mean = 0.9 * module.mean + 0.1
        kept.read(update)
        found |= told_by(rows)
    assert "stopped_writes.mean" not in found


def test_a_copy_in_evaluation_mode_all_along_does_not_rest_by_its_mode():
    assert {name.rpartition(".")[2] for name in told(lambda module: None, begins=nn.Module.eval)} == {"mean", "average"}


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch):
    """Other tests of this process compile."""
    monkeypatch.setattr(stopped_writes, "has_compiled", lambda: False)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda module: None, {"mean", "average"}),
        (lambda module: setattr(module, "mean", torch.ones(4)), {"mean", "average"}),
        (lambda module: module.eval(), set()),
        (lambda module: module.average.requires_grad_(), {"mean"}),
    ],
)
def test_buffers_and_averages_of_a_module_in_training_are_told_of(change, names):
    found = told(change)
    assert set(found) == {f"stopped_writes.kept.{name}" for name in names}
    assert all(abs(since - LOOK_EVERY * (WRITTEN_BEFORE + 4)) <= 2 * LOOK_EVERY for since in found.values())
