"""Random numbers that come again are told once for each device, and not where a run goes back by right."""

from step_records import Records

from trainsentry.anomaly.rules.data.repeated_random import RepeatedRandomRule

LOSS, CPU, CUDA = ("loss", "loss"), ("repeated_random.cpu",) * 2, ("repeated_random.cuda",) * 2


def judged(alone, rows_of, steps):
    records = Records()
    judge = alone(RepeatedRandomRule, records.table)
    found = [judge(records.step(step, {LOSS: 1.0} | rows_of(step))) for step in steps]
    return [(f.name, f.step, f.last_clean, f.value) for each in found for f in each]


def test_the_first_repetition_of_each_device_is_told_with_the_step_that_it_repeats(alone):
    found = judged(alone, lambda s: {CPU: 30.0} if s >= 50 else {CUDA: 7.0} if s == 40 else {}, range(60))
    assert found == [("random numbers on cuda", 40, 39, 33.0), ("random numbers on cpu", 50, 49, 20.0)]


def test_steps_that_are_done_again_draw_what_they_drew_by_right(alone):
    assert judged(alone, lambda s: {}, [*range(60), *range(40, 60)]) == []
    found = judged(alone, lambda s: {CPU: 20.0} if s in (45, 65) else {}, [*range(45), *range(46, 60), 45, 46, 65])
    assert found == [("random numbers on cpu", 65, 64, 45.0)]
