"""A data loader that begins anew after a resume is found; one that goes on, or that repeats data by design, is not."""

import json
import random
from functools import partial

import pytest
from step_records import Records

from trainsentry.anomaly.detection import Detection
from trainsentry.anomaly.incidents.sentence import evidence
from trainsentry.anomaly.rules.data.repeated_data import RepeatedDataRule
from trainsentry.anomaly.rules.data.resumed_batches import FIRST, NEWEST
from trainsentry.collectors.statistics import VALUE

INPUT = ("input.0", "activation_input")
SAVED = 100
"""Steps before the checkpoint."""


def train(judge, records, batches, first=0):
    """Return the findings in the steps from `first` on, with these batches, each a number."""
    found = []
    for step, batch in enumerate(batches, first):
        record = records.step(step, {INPUT: 1.0})
        record.values[:, VALUE] = 1000 + batch
        found += judge(record)
    return found


def saved_after(batches):
    """Return the checkpoint of a process that had these batches."""
    records = Records()
    detection = Detection(records.table)
    train(detection.judge, records, batches)
    return json.loads(json.dumps(detection.state()))


def goes_on(state, after, first):
    """Return the findings of a new process that goes on from a checkpoint at step `first`."""
    records = Records()
    detection = Detection(records.table)
    detection.load(state)
    return train(detection.judge, records, after, first)


def resumed(before, after):
    """Return the findings of a new process that goes on from the checkpoint of one that had the batches `before`."""
    return goes_on(saved_after(before), after, len(before))


def test_a_loader_that_begins_anew_is_found_at_its_third_batch():
    [found] = resumed(range(SAVED), range(20))
    assert (found.detector, found.step, found.value, found.last_clean) == ("repeated_data", 100, 0, 99)
    sentence = (
        "the data loader began anew after the resume: input.0 (data) of step 100 is the batch of step 0 again, and the "
        "next 2 follow as they did then"
    )
    assert evidence(found).startswith(sentence)


def test_one_that_goes_back_to_the_middle_is_found():
    [found] = resumed(range(SAVED), range(80, 130))
    assert (found.step, found.value) == (100, 80)


def test_a_checkpoint_of_a_long_run_holds_its_first_and_its_newest_batches_and_no_more():
    steps = FIRST + NEWEST + 500
    state = saved_after(range(steps))
    assert len(state["batches"]) <= FIRST + NEWEST + 1
    assert [f.value for f in goes_on(state, range(20), steps)] == [0]
    assert [f.value for f in goes_on(state, range(steps - 9, steps + 9), steps)] == [steps - 9]
    assert goes_on(state, range(FIRST + 20, FIRST + 40), steps) == []  # as long as it is remembered


def test_the_next_resume_still_knows_the_run_s_first_batches():
    records = Records()
    detection, batches = Detection(records.table), range(SAVED)
    for part in range(3):
        train(detection.judge, records, range(part * SAVED, (part + 1) * SAVED), part * SAVED)
        state = detection.state()
        detection = Detection(records.table)
        detection.load(state)
    assert [f.value for f in train(detection.judge, records, batches, 3 * SAVED)] == [0]


DONE = {
    "goes on": (range(SAVED), range(SAVED, SAVED + 50)),
    "the next epoch, shuffled": (range(SAVED), random.Random(1).sample(range(SAVED), SAVED)),
    "drawn with replacement": (range(SAVED), random.Random(2).choices(range(SAVED), k=SAVED)),
    "one old batch, then new": (range(SAVED), [0, *range(SAVED, SAVED + 50)]),
    "two old batches, then new": (range(SAVED), [0, 1, *range(SAVED, SAVED + 50)]),
    "epochs in order": ([*range(60)] * 3, [*range(60)]),
    "soon after an epoch in order has begun again": ([*range(100), *range(5)], range(5, 60)),
    "the same, of a long epoch": ([*range(FIRST + NEWEST), *range(5)], range(5, 60)),
    "a few batches for ever": ([*range(20)] * 8, range(20)),
    "a short run": (range(30), range(30)),
    "old data later": (range(SAVED), [*range(SAVED, SAVED + 5), *range(20)]),
}


@pytest.mark.parametrize("what", DONE)
def test_what_people_do_is_no_finding(what):
    before, after = DONE[what]
    assert resumed(before, after) == []


def test_a_run_that_goes_back_within_a_process_trains_on_its_later_batches_again(alone):
    records = Records()
    judge = partial(alone, RepeatedDataRule)(records.table)
    rule = judge.rule
    train(judge, records, range(SAVED))
    state = rule.saved(0)
    train(judge, records, range(SAVED, SAVED + 40), SAVED)
    rule.load(state)
    assert train(judge, records, range(SAVED, SAVED + 60), SAVED) == []
