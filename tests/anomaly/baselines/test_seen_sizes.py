"""What a settled policy meets again is nothing new; where nobody makes the data, or for sizes never seen, it is."""

import json

import numpy as np
import pytest
from step_records import Records

from trainsentry.anomaly.detection import Detection

DATA = ("input.0", "activation_input")
GRADIENTS = [(f"value.{i}.weight", "gradient") for i in range(6)]
SETTLED, AGAIN = 150, 420


def told(block, again, *, of=GRADIENTS[0], seed=0, zero_at=-1, resumes_at=-1):
    """Return who is alarmed of: one series is 50 times as large as later, settles, and comes `again` for three steps.

    The data are of one size for `block` steps each.
    """
    records, random, found = Records(), np.random.default_rng(seed), []
    detection, size = Detection(records.table), 1.0
    for step in range(AGAIN + 20):
        if step % block == 0:
            size = float(np.exp(0.1 * random.standard_normal()))
        sizes = {key: float(np.exp(0.1 * random.standard_normal())) for key in GRADIENTS}
        sizes[DATA] = size * float(np.exp(0.01 * random.standard_normal()))
        large = max(50.0 * 0.97 ** max(0, step - SETTLED), 1.0)
        if step == resumes_at:
            state = json.loads(json.dumps(detection.state()))
            detection = Detection(records.table)
            detection.load(state)
        sizes[of] *= 0.0 if step == zero_at else 1.0
        sizes[of] *= again if AGAIN <= step < AGAIN + 3 else large
        found += [(a.step, a.name) for a in detection.judge(records.step(step, sizes)) if a.alarm]
    return {name for step, name in found if step >= AGAIN}


@pytest.mark.parametrize("of", [GRADIENTS[0], DATA])
@pytest.mark.parametrize("seed", range(3))
def test_a_policy_may_meet_again_what_it_met_before(of, seed):
    assert told(4, 40.0, of=of, seed=seed) == set()


def test_a_gradient_that_was_zero_once_is_not_of_every_smaller_size(tmp_path):
    assert GRADIENTS[0][0] in told(4, 1e-4, zero_at=200)


def test_sizes_come_back_with_a_state():
    assert told(4, 40.0, resumes_at=AGAIN - 20) == set()


@pytest.mark.parametrize(("block", "again"), [(4, 4000.0), (1, 40.0)], ids=["never as large", "data of their own"])
def test_what_was_never_met_or_is_no_policys_is_told(block, again):
    assert GRADIENTS[0][0] in told(block, again)
