"""Batches that are served again in the midst of an epoch are found; epochs, stages and a few batches are not."""

import random
from functools import partial

import pytest
from step_records import Records

from trainsentry.anomaly.detection import Detection
from trainsentry.anomaly.incidents.sentence import evidence
from trainsentry.anomaly.rules.data.repeated_data import REMEMBERED, RepeatedDataRule
from trainsentry.collectors.statistics import VALUE

INPUT = ("input.0", "activation_input")


def served(batches, judge_of, every=1, missing=()):
    """Return the findings in a run over batches, each a number; some steps are not sampled."""
    records = Records()
    judge = judge_of(records.table)
    found = []
    for step, batch in enumerate(batches):
        if step % every or step in missing:
            continue
        record = records.step(step, {INPUT: 1.0})
        record.values[:, VALUE] = 1000 + batch
        found += judge(record)
    return found


@pytest.fixture
def rule(alone):
    return partial(alone, RepeatedDataRule)


def test_a_loader_that_repeats_a_few_batches_is_found_within_its_second_round(rule):
    [found] = served([*range(90), *([60, 61, 62, 63] * 10)], rule)
    assert (found.step, found.value, found.last_clean) == (94, 60, 89)


def test_a_loader_that_begins_to_serve_batches_twice_is_found_at_the_third(rule):
    twice = [b for b in range(60, 90) for _ in range(2)]
    [found] = served([*range(60), *twice], rule)
    assert (found.statistic, found.step, found.value, found.last_clean) == ("echo", 61, 60, 60)


def shuffled(parts, epochs):
    """Return the batches of epochs in which the parts come in an order of their own."""
    order = [random.Random(e).sample(parts, len(parts)) for e in range(epochs)]
    return [batch for epoch in order for part in epoch for batch in part]


DONE = {
    "epochs in order": [*range(60)] * 4,
    "epochs that are shuffled": shuffled([[b] for b in range(80)], 6),
    "shards that are shuffled": shuffled([[*range(s, s + 20)] for s in range(0, 80, 20)], 6),
    "a few batches for ever": [*range(20)] * 12,
    "one batch": [0] * 200,
    "a rehearsal before the run": [*range(10), *range(10), *range(10, 200)],
    "each batch twice": [b for b in range(100) for _ in range(2)],
    "a batch twice now and then": [b for b in range(200) for _ in range(1 + (b % 9 == 8))],
    "a loader that is stuck": [*range(60), *[60] * 30],  # another rule's
    "each batch four times": [b for b in range(100) for _ in range(4)],
    "drawn with replacement": random.Random(0).choices(range(2000), k=1500),
    "twice in order, then new": [*range(100), *range(100), *range(100, 1000)],
    "set back, then on": [*range(100), *range(80, 140)],
    "a mixture": [
        b for e in range(40) for b in [*[4 * (e % 20) + i for i in range(4)], *range(1000 + 16 * e, 1016 + 16 * e)]
    ],
    "a probe now and then": [b for e in range(20) for b in [*range(100 * e, 100 * e + 60), *range(9000, 9005)]],
    "a stage of its own, twice": [*range(60), *range(60, 120), *range(60, 120), *range(120, 200)],
    "an epoch longer than what is remembered": [*range(REMEMBERED + 500)] * 2,
}


@pytest.mark.parametrize("what", DONE)
def test_what_people_do_is_no_finding(what, rule):
    assert served(DONE[what], rule) == []


def test_only_steps_that_were_all_seen_are_compared(rule):
    batches = [*range(90), *([60, 61, 62, 63] * 10)]
    assert len(served(batches, rule)) == 1
    assert served(batches, rule, every=10) == []
    assert served(batches, rule, missing=range(92, 200, 3)) == []


def test_a_run_that_goes_back_is_served_the_same_again(rule):
    records = Records()
    judge = rule(records.table)
    for step in [*range(100), *range(90, 110), *range(100, 120), *range(100, 160)]:
        record = records.step(step, {INPUT: 1.0})
        record.values[:, VALUE] = 1000 + step
        assert judge(record) == []


def test_several_inputs_are_told_apart_together(rule):
    records = Records()
    judge = rule(records.table)
    for step in range(200):
        record = records.step(step, {INPUT: 1.0, ("input.1", "activation_input"): 1.0})
        record.values[0, VALUE], record.values[1, VALUE] = step % 3, step
        assert judge(record) == []


def test_the_sentence_says_which_step_s_batch_came_again():
    [*_, found] = served([*range(90), *([60, 61, 62, 63] * 10)], lambda table: Detection(table).judge)
    assert (found.quantity, found.kind) == ("data", "duplicate_data")
    assert evidence(found) == (
        "the data loader is repeating a few old batches: input.0 (data) of step 94 is the batch of step 60, for the "
        "third time; it was last healthy at step 89"
    )
