"""A pass that begins with old random numbers has a row; nothing else has, and no generator moves by being looked at."""

import pytest
import torch

from trainsentry.collectors.series import SeriesTable
from trainsentry.collectors.statistics import VALUE
from trainsentry.collectors.torch import random_states
from trainsentry.collectors.torch.device.device import Device
from trainsentry.collectors.torch.random_states import DIGESTED, NEW_BEFORE, RandomStates, _digest
from trainsentry.collectors.torch.rows.step_rows import StepRows


def repeated(step_of, steps):
    """Return (step, steps ago) of each row; `step_of(step, begin_pass)` is what a program does in a step."""
    rows = StepRows(SeriesTable())
    states, found = RandomStates(rows), []
    for step in range(steps):
        states.open_step()
        step_of(step, states.begin_pass)
        found += [(step, value) for value in rows.take().resolve()[2][:, VALUE].tolist()]
    return found


@pytest.fixture(autouse=True)
def _own_numbers():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def passes(step, begin, seed=None, draws=True, micro_steps=1):
    for _ in range(micro_steps):
        if seed is not None:
            torch.manual_seed(seed)
        begin()
        if draws:
            torch.rand(3)


def test_a_seed_in_the_midst_of_a_run_has_a_row_at_each_pass_that_repeats_another():
    found = repeated(lambda s, begin: passes(s, begin, seed=1 if s in (25, 30, 33) else None), 36)
    assert found[:2] == [(30, 5.0), (31, 5.0)], "all that is drawn after a seed is drawn again"
    assert (33, 3.0) in found
    assert len(found) == 6


def test_micro_steps_with_one_seed_have_a_row_from_the_next_step_on():
    found = repeated(lambda s, begin: passes(s, begin, seed=1 if s >= 25 else None, micro_steps=3), 28)
    assert found == [(26, 1.0), (27, 1.0)]


@pytest.mark.parametrize(
    "program",
    [
        passes,
        lambda s, begin: passes(s, begin, draws=False),
        lambda s, begin: passes(s, begin, seed=s),
        lambda s, begin: passes(s, begin, seed=1),  # the program's way
        lambda s, begin: passes(s, begin, seed=s % (NEW_BEFORE // 2)),
        lambda s, begin: passes(s, begin, draws=s % 10 == 0, micro_steps=2),
    ],
)
def test_numbers_that_go_on_stand_still_or_are_seeded_by_design_have_none(program):
    assert repeated(program, 80) == []


def test_a_look_leaves_the_generators_as_they_are():
    before = torch.get_rng_state()
    repeated(lambda s, begin: passes(s, begin, draws=False), 3)
    assert torch.equal(before, torch.get_rng_state())


def test_no_more_states_are_remembered_than_stated(monkeypatch):
    monkeypatch.setattr(random_states, "REMEMBERED", 30)
    rows = StepRows(SeriesTable())
    states = RandomStates(rows)
    for _ in range(100):
        states.open_step()
        passes(0, states.begin_pass)
    assert len(states._generators["cpu"].seen) == 30
    torch.manual_seed(0)
    states.open_step()
    passes(0, states.begin_pass)
    assert len(rows) == 0, "the state of the first step is forgotten"


@pytest.mark.parametrize("error", [AttributeError, NotImplementedError, RuntimeError])
def test_a_device_whose_numbers_cannot_be_read_is_left_out(monkeypatch, error):
    class Backend:
        @staticmethod
        def get_rng_state():
            raise error("not here")

    other = Device("meta", has_float64=True)
    monkeypatch.setattr(Device, "module", Backend)
    monkeypatch.setattr(Device, "is_in_use", lambda _: True)
    monkeypatch.setattr(random_states, "accelerator", lambda: other)
    found = repeated(lambda s, begin: passes(s, begin, seed=1 if s in (25, 30) else None), 31)
    assert found == [(30, 5.0)], "torch's own on the host is read"


def test_a_state_is_told_apart_by_its_ends_alone_however_many_numbers_were_drawn():
    generator = torch.Generator()
    assert generator.get_state().numel() > 2 * DIGESTED, "else nothing is left out"
    found = []
    for seed in (1, 2, 1 << 40):
        generator.manual_seed(seed)
        for _ in range(1500):  # the words of a Mersenne twister are new after each 624
            found.append(_digest(generator.get_state()))
            torch.rand(1, generator=generator)
    assert len(set(found)) == len(found)
    generator.manual_seed(1)
    assert _digest(generator.get_state()) == found[0]


def test_a_large_state_costs_the_reading_of_its_ends():
    state = torch.zeros(4 * DIGESTED, dtype=torch.uint8)
    plain = _digest(state)
    for place, told in ((0, True), (DIGESTED - 1, True), (2 * DIGESTED, False), (-DIGESTED, True), (-1, True)):
        changed = state.clone()
        changed[place] = 1
        assert (_digest(changed) != plain) is told, place
