"""The check before the update suspects what the rules will tell, however often a step is looked at."""

import numpy as np
from step_records import Records

from trainsentry.anomaly.pre_update_check import LEARNED, PreUpdateCheck, Suspected

LOSS = ("loss", "loss")


def suspected(losses, looks):
    records = Records()
    check = PreUpdateCheck(records.table)
    steps = [records.step(step, {LOSS: loss}) for step, loss in enumerate(losses)]
    return [step for step, record in enumerate(steps) for _ in range(looks) if check.suspect(record)]


def test_a_loss_above_its_start_is_suspected_before_the_update():
    records = Records()
    check = PreUpdateCheck(records.table)
    losses = [*np.linspace(3.5, 1.0, 100), 5.2]
    found = [check.suspect(records.step(step, {LOSS: loss})) for step, loss in enumerate(losses)]
    assert found == [None] * 100 + [Suspected.FAR_OUT]


def test_two_optimizers_in_a_step_take_its_loss_once():
    quieter = [*np.linspace(3.6, 3.0, 10), *np.tile([1.0, 2.0], 30), *np.linspace(2.0, 1.9, 12)]
    assert suspected([*quieter, 4.3], looks=2) == []
    assert suspected([*quieter, 14.3], looks=2) == [len(quieter)] * 2


def far_out(looks, calm):
    """Return how often a gradient 1,000 times as large as in each of some calm steps is suspected in its step."""
    records = Records()
    check = PreUpdateCheck(records.table)
    for step in range(calm + 1):
        sizes = {(f"p{i}.weight", "gradient"): 1000.0 if step == calm and i == 0 else 1.0 for i in range(3)}
        record = records.step(step, sizes)
        found = [check.suspect(record) for _ in range(looks)]
    return found.count(Suspected.FAR_OUT)


def test_two_optimizers_in_a_step_count_its_gradients_once():
    assert far_out(looks=1, calm=LEARNED) == 1
    assert far_out(looks=2, calm=LEARNED) == 2
    assert far_out(looks=2, calm=LEARNED - 1) == far_out(looks=1, calm=LEARNED - 1) == 0
