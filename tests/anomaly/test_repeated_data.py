"""Batches that are served again in the midst of an epoch are found; epochs, stages and a few batches are not."""

import random

import pytest
from step_records import Records

from trainsentry.anomaly.repeated_data import KEPT, RepeatedDataRule
from trainsentry.anomaly.sentence import evidence
from trainsentry.collectors.statistics import VALUE

INPUT = ("input.0", "activation_input")


def served(batches, rule=None):
    """Return what is said of a run over batches, each a number."""
    records = Records()
    rule = RepeatedDataRule(records.table) if rule is None else rule(records.table)
    found = []
    for step, batch in enumerate(batches):
        record = records.step(step, {INPUT: 1.0})
        record.values[:, VALUE] = 1000 + batch
        found += rule.judge(record)
    return found


def test_a_loader_that_goes_round_a_few_batches_is_found_within_its_second_round():
    [found] = served([*range(90), *([60, 61, 62, 63] * 10)])
    assert (found.step, found.value, found.last_clean) == (94, 60, 89)


def test_a_loader_that_was_set_back_is_found_when_new_data_comes():
    [found] = served([*range(100), *range(80, 140)])
    assert (found.step, found.last_clean) == (120, 99)


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
    "each batch four times": [b for b in range(100) for _ in range(4)],
    "drawn with replacement": random.Random(0).choices(range(2000), k=1500),
    "a stage of its own, twice": [*range(60), *range(60, 120), *range(60, 120), *range(120, 200)],
    "an epoch longer than what is remembered": [*range(KEPT + 500)] * 2,
}


@pytest.mark.parametrize("what", DONE)
def test_what_people_do_is_no_finding(what):
    assert served(DONE[what]) == []


def test_an_earlier_run_s_batches_are_known_after_a_restart():
    first = RepeatedDataRule(Records().table)
    records = Records()
    first.table = records.table
    for step in range(100):
        record = records.step(step, {INPUT: 1.0})
        record.values[:, VALUE] = 1000 + step
        first.judge(record)

    def restarted(table):
        rule = RepeatedDataRule(table)
        rule.load(first.saved())
        return rule

    assert served(range(100, 300), restarted) == []
    assert len(served([*range(90, 99), *range(100, 200)], restarted)) == 1


def test_several_inputs_are_told_apart_together():
    records = Records()
    rule = RepeatedDataRule(records.table)
    for step in range(200):
        record = records.step(step, {INPUT: 1.0, ("input.1", "activation_input"): 1.0})
        record.values[0, VALUE], record.values[1, VALUE] = step % 3, step
        assert rule.judge(record) == []


def test_the_sentence_says_which_step_s_batch_came_again():
    from trainsentry.anomaly.detection import Detection

    [*_, found] = served([*range(90), *([60, 61, 62, 63] * 10)], Detection)
    assert (found.quantity, found.kind) == ("data", "duplicate_data")
    assert "the batch of step 60 is served again and again at step 94" in evidence(found)
