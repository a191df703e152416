"""A loss scale that collapses is reported once; a scaler at work is not."""

from step_records import Records

from trainsentry.anomaly.rules.optimizer.loss_scale import LossScaleRule

G = ("fc.weight", "gradient")


def test_a_loss_scale_that_collapses_is_reported_once(alone, judged):
    records = Records()
    rule = alone(LossScaleRule, records.table)
    for step in range(60):
        assert rule(records.step(step, {G: 1.0}, skipped=step % 8 == 0)) == [], "a scaler at work"
    found = judged(rule, records, range(60, 90), {G: 1.0}, skipped=True)
    assert [f.kind for f in found] == ["loss_scale_collapse"]
