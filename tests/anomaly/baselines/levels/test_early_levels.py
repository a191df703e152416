"""What a module gives is known after few samples: it is told where two of them are far apart from those before."""

import numpy as np
import pytest
from step_records import Records

from trainsentry.anomaly.detection import Detection
from trainsentry.collectors.statistics import MEAN

OUT = [(f"blocks.{i}.fc.output.0", "activation_output") for i in range(8)]
GRADIENTS = [(f"blocks.{i}.fc.weight", "gradient") for i in range(8)]
LOSS, DATA = ("loss", "loss"), ("input.0", "activation_input")
EVERY = 10
"""Steps between two samples of activations, as by default."""


def told(
    size, *, at=93, mean=0.0, loss=1.0, steps=130, every=EVERY, seed=0, start=0, until=10**6, dense=(), known=None,
    block=0,
):  # fmt: skip
    """Return the alarms of a run in which an output has another size and mean from a step on, as has the loss.

    In the steps `dense` it is sampled too. `known` is the detection of the run that it goes on from. Data are given
    whose size is the same in `block` steps each, none for 0.
    """
    records, random, found = Records(), np.random.default_rng(seed), []
    detection = Detection(records.table)
    if known is not None:
        detection.load(known.state())
    for step in range(start, steps):
        sizes = dict.fromkeys(GRADIENTS, 1.0) | {LOSS: loss if step >= at else 1.0}
        if step % every == 0 or step in dense:
            sizes |= dict.fromkeys(OUT, 1.0) | {OUT[3]: size if at <= step < until else 1.0}
        if block:
            sizes[DATA] = float(np.exp(0.1 * np.random.default_rng([seed, step // block]).standard_normal()))
        noisy = {key: each * float(np.exp(0.02 * random.standard_normal())) for key, each in sizes.items()}
        record = records.step(step, noisy)
        if OUT[3] in sizes:
            record.values[list(sizes).index(OUT[3]), MEAN] = (
                mean if step >= at else 0.0
            ) + 0.005 * random.standard_normal()
        found += [(a.name, a.quantity, a.step, a.last_clean) for a in detection.judge(record) if a.alarm]
    told.detection = detection
    return [each for each in found if each[1] == "activation_output"]


@pytest.mark.parametrize("size", [0.6, 1.7])
def test_another_size_is_told_by_its_first_sample(size):
    assert told(size)[:1] == [(*OUT[3], 100, 90)]


@pytest.mark.parametrize("seed", range(5))
def test_a_mean_that_turns_is_told_where_the_loss_is_worse(seed):
    assert told(1.0, mean=0.2, seed=seed) == []
    assert told(1.0, mean=0.2, loss=1.15, seed=seed)[:1] == [(*OUT[3], 100, 90)]


@pytest.mark.parametrize("seed", range(5))
def test_noise_and_a_size_that_changes_little_are_nothing(seed):
    assert told(1.0, steps=340, seed=seed) == []
    assert told(1.08, seed=seed) == []


def test_a_size_that_is_far_is_told_whatever_its_mean_does():
    assert told(1.7, mean=0.4)[:1] == [(*OUT[3], 100, 90)]


def test_what_passes_within_steps_is_no_level_though_it_is_sampled_twice():
    """As in the steps after an incident, which are all sampled."""
    dense = range(96, 116)
    assert told(1.8, at=103, until=105, dense=dense) == []
    assert told(1.8, at=103, dense=dense)[:1] == [(*OUT[3], 103, 102)]


def test_a_range_of_an_earlier_run_is_no_short_past():
    told(1.0, steps=90)
    assert told(1.25, at=20_000, start=20_000, steps=20_021, known=told.detection) == []


def test_samples_of_steps_in_a_row_are_no_past_yet():
    """A model that begins to learn changes within steps."""
    assert told(1.7, at=25, every=1, steps=40) == []


@pytest.mark.parametrize(("block", "is_told"), [(1, True), (4, False)])
def test_what_a_policy_gives_changes_with_what_it_observes(block, is_told):
    """Four updates use each rollout, and an output of the policy fell to a half as it learned."""
    assert bool(told(0.6, block=block)) == is_told
    assert told(0.1, block=block)
