"""The schedule is a function of the step number and of requested dense sampling."""

from trainsentry.monitor.config.files import load_config
from trainsentry.monitor.schedule import Schedule
from trainsentry.monitor.step_end import PATIENCE, StepEnd


def steps(schedule, part, n=40):
    return [step for step in range(n) if part in schedule.plan(step)]


def test_every_start_and_stop():
    config = {"start_step": 5, "stop_step": 30, "collect": {"parameters": {"every": 7}, "updates": False}}
    schedule = Schedule(load_config(config))
    assert steps(schedule, "parameters") == [7, 14, 21, 28]
    assert steps(schedule, "gradients") == list(range(5, 30))
    assert steps(schedule, "updates") == []


def test_dense_sampling_takes_all_parts_that_are_on():
    schedule = Schedule(load_config({"collect": {"updates": False}}))
    assert steps(schedule, "activations", 25) == [0, 10, 20]
    schedule.sample_every_step(13, 4)
    assert steps(schedule, "activations", 25) == [0, 10, 13, 14, 15, 16, 20]
    assert steps(schedule, "updates") == []


def test_a_step_ends_when_the_last_optimizer_has_stepped():
    end = StepEnd("ab")
    assert [end.stepped(x) for x in "aababb"] == [False, False, True, False, True, False]


def test_an_optimizer_that_rests_is_left_out_until_it_steps_again():
    end = StepEnd("ab")
    ended = [end.stepped("a") for _ in range(PATIENCE + 3)]
    assert ended == [False] * (PATIENCE - 1) + [True] * 4
    assert [end.stepped(x) for x in "baab"] == [False, True, False, True]
