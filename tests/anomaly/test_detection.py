"""What is reported, what is not, and that a series stays alive."""

import numpy as np
import pytest
from step_records import Records

from trainsentry.anomaly.detection import Detection
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.optimizer.learning_rate import LearningRateRule
from trainsentry.collectors.series import Layout
from trainsentry.collectors.statistics import ZEROS

NAN, INF = float("nan"), float("inf")
W = ("fc.weight", "gradient")
rng = np.random.default_rng(0)


def healthy(records, detection, steps, series, start=0, noise=0.1):
    found = []
    for step in range(start, start + steps):
        sizes = {key: float(np.exp(noise * rng.standard_normal())) for key in series}
        found += detection.judge(records.step(step, sizes))
    return found


def setup(series=(W,), steps=40, **kwargs):
    records = Records(**kwargs)
    detection = Detection(records.table)
    assert healthy(records, detection, steps, series) == []
    return records, detection


def test_a_spike_is_reported_and_not_learned():
    records, detection = setup()
    for step in range(40, 60):
        [found] = detection.judge(records.step(step, {W: 50.0}))
        assert found.kind == ("spike" if step < 42 else "shift"), "what lasts is a new level"
        assert found.expected == pytest.approx(1.0, rel=0.2) or found.statistic == "max"
        assert found.score > 8


@pytest.mark.parametrize(("dtype", "alarms"), [("int64", [False, True]), ("float32", [True, True])])
def test_numbers_of_tokens_or_classes_that_are_odd_by_themselves_are_a_suspect_and_alarm_nobody(dtype, alarms):
    data = ("input.labels", "activation_input")
    records, detection = setup([data, W], steps=100, dtype=dtype)
    alone = detection.judge(records.step(100, {data: 1e4, W: 1.0}))
    healthy(records, detection, 50, [data, W], start=101)
    with_others = detection.judge(records.step(151, {data: 1e4, W: 1e4}))
    assert [any(a.alarm for a in found) for found in (alone, with_others)] == alarms
    assert "input.labels" in {a.name for a in with_others}


def test_tokens_of_which_a_part_is_missing_alarm():
    tokens = ("input.0", "activation_input")
    records, detection = setup([tokens, W], steps=100, dtype="int64")
    record = records.step(100, {tokens: 1.0, W: 1.0})
    record.values[0, ZEROS] = 0.5
    assert [(a.name, a.statistic, a.alarm) for a in detection.judge(record)] == [("input.0", "zeros", True)]


def test_a_level_that_stays_becomes_normal():
    records, detection = setup()
    found = [detection.judge(records.step(40 + i, {W: 50.0 * (1 + i % 3 / 10)})) for i in range(60)]
    assert found[0]
    assert found[-1] == []


def test_there_is_no_verdict_before_the_warm_up():
    records = Records()
    detection = Detection(records.table)
    for step, size in enumerate((1.0, 1e3, 1.0, 1e4)):
        assert detection.judge(records.step(step, {W: size})) == []


def test_a_weight_that_grows_steadily_after_a_quiet_time_is_silent_and_a_jump_is_not():
    records = Records()
    detection = Detection(records.table)
    weight = ("fc.weight", "parameter")
    for step in range(60):
        size = 0.14 if step < 30 else 0.14 * 1.02 ** (step - 30)
        assert not any(a.alarm for a in detection.judge(records.step(step, {weight: size})))
    assert [a.kind for a in detection.judge(records.step(60, {weight: 20.0}))] == ["spike"]


def test_smooth_growth_and_decay_are_silent():
    records = Records()
    detection = Detection(records.table)
    for step in range(300):
        growth = {W: 0.01 * 1.03**step, ("b", "gradient"): 100 * 0.95**step, ("c", "parameter"): 1 + step / 100}
        assert detection.judge(records.step(step, growth)) == []


def test_nan_that_came_in_is_not_the_modules_fault():
    records = Records()
    names = ["a", "b", "c"]
    series = [(f"{n}.{side}.0", f"activation_{side}") for n in names for side in ("input", "output")]
    detection = Detection(records.table)
    healthy(records, detection, 10, series)
    sizes = dict.fromkeys(series, NAN)
    sizes["a.input.0", "activation_input"] = sizes["a.output.0", "activation_output"] = 1.0
    sizes["b.input.0", "activation_input"] = 1.0
    found = detection.judge(records.step(10, sizes))
    assert {(a.name, a.passed_on) for a in found} == {("b.output.0", False), ("c.output.0", True)}


def test_provenance_is_kept_within_a_micro_step():
    records = Records()
    detection = Detection(records.table)
    sizes = {
        ("a.input.0", "activation_input", 0): NAN,
        ("a.output.0", "activation_output", 0): NAN,
        ("a.input.0", "activation_input", 1): 1.0,
        ("a.output.0", "activation_output", 1): NAN,
    }
    found = detection.judge(records.step(0, sizes))
    assert {(a.micro_step, a.passed_on) for a in found} == {(0, True), (1, False)}


@pytest.mark.parametrize(("loss", "passed_on"), [(50.0, False), (NAN, True)])
def test_a_loss_that_is_merely_large_makes_no_nan(loss, passed_on):
    records = Records()
    detection = Detection(records.table)
    series = [("loss", "loss"), ("fc.weight", "gradient_unreduced")]
    healthy(records, detection, 80, series)
    found = detection.judge(records.step(80, {series[0]: loss, series[1]: NAN}))
    assert [a.passed_on for a in found if a.name == "fc.weight"] == [passed_on]
    assert "loss" in {a.name for a in found}


def test_bad_data_is_the_roots_input():
    records = Records()
    sizes = {("input.0", "activation_input"): NAN, ("output.0", "activation_output"): NAN}
    found = Detection(records.table).judge(records.step(0, sizes))
    assert {(a.name, a.passed_on) for a in found} == {("input.0", False), ("output.0", True)}


def test_a_skipped_step_is_the_scalers_normal_work():
    records, detection = setup()
    assert detection.judge(records.step(40, {W: INF}, skipped=True)) == []
    assert healthy(records, detection, 3, [W], start=41) == []


def test_scalars_that_jump_by_design_are_not_judged_but_loss_is():
    series = [("loss", "loss"), ("learning_rate", "learning_rate"), ("bleu", "bleu")]
    records, detection = setup(series[:2])
    sizes = {series[0]: 50.0, series[1]: 50.0, series[2]: NAN}
    sizes[series[1]] = 0.5
    assert [a.name for a in detection.judge(records.step(40, sizes))] == ["loss"]


def test_healthy_noise_is_silent_over_many_series():
    records = Records()
    detection = Detection(records.table)
    series = [(f"p{i}.weight", "gradient") for i in range(100)]
    assert healthy(records, detection, 300, series, noise=0.5) == []


def test_a_restored_state_needs_no_warm_up():
    import json

    _records, detection = setup()
    state = json.loads(json.dumps(detection.state()))
    later = Records()
    restored = Detection(later.table)
    restored.load(state)
    assert restored.judge(later.step(100, {("other", "gradient"): 1.0, W: 1.0})) == []
    assert [a.kind for a in restored.judge(later.step(101, {W: 100.0}))] == ["spike"]


def test_an_update_of_bad_gradients_passes_on_even_when_the_step_comes_in_parts():
    series = [("fc.weight", "gradient"), ("fc.weight", "update")]
    records, detection = setup(series)
    [gradient] = detection.judge(records.step(40, {series[0]: NAN}))
    [update] = detection.judge(records.step(40, {series[1]: NAN}))
    assert (gradient.passed_on, update.passed_on) == (False, True)


def test_a_container_is_not_to_blame_for_what_happens_inside_it():
    records = Records()
    detection = Detection(records.table)
    sizes = {("a.b.output.0", "activation_output"): NAN, ("a.output.0", "activation_output"): NAN}
    found = detection.judge(records.step(0, sizes))
    assert {(a.name, a.passed_on) for a in found} == {("a.b.output.0", False), ("a.output.0", True)}


def test_noise_near_the_smallest_floats_is_nothing():
    records = Records()
    detection = Detection(records.table)
    state = ("fc.weight", "exp_avg_sq")
    for step in range(50):
        assert detection.judge(records.step(step, {state: 1e-39 * 3000 ** (step % 2)})) == []


def test_a_skipped_step_does_not_excuse_a_weight_an_activation_or_the_loss():
    series = [
        W,
        ("fc.weight", "parameter"),
        ("fc.output.0", "activation_output"),
        ("loss", "loss"),
        ("grad_norm", "grad_norm"),
    ]
    records, detection = setup(series)
    found = detection.judge(records.step(40, dict.fromkeys(series, NAN), skipped=True))
    assert {a.quantity for a in found} == {"parameter", "activation_output", "loss"}


def test_a_metric_that_is_nan_between_evaluations_is_silent():
    records = Records()
    detection = Detection(records.table)
    for step in range(60):
        metric = 0.5 if step % 10 == 0 else NAN
        assert detection.judge(records.step(step, {("val_accuracy", "val_accuracy"): metric, W: 1.0})) == []


def test_a_history_with_norms_alone_is_judged_by_them():
    records, detection = Records(), None
    detection = Detection(records.table)
    for step in range(41):
        record = records.step(step, {W: 1.0 if step < 40 else 1e9})
        record.values[:, :3] = np.nan
        found = detection.judge(record)
    assert [a.kind for a in found] == ["spike"]


@pytest.mark.parametrize(("a_step", "found"), [(0.93, False), (1 / 0.93, True)])
def test_a_loss_that_falls_for_long_is_training_and_one_that_rises_is_not(a_step, found):
    loss = ("loss", "loss")
    records, detection = setup(series=(loss,), steps=80)
    said = []
    for n in range(60):
        size = float(a_step**n * np.exp(0.03 * rng.standard_normal()))
        said += detection.judge(records.step(80 + n, {loss: size}))
    assert bool(said) == found


HOSTILE = (NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 3.4e38, 1e308, -1e308, 1e-45, 5e-324, 2.0**53)
QUANTITIES = (
    "gradient", "gradient_unreduced", "parameter", "update", "moment_direction", "exp_avg", "exp_avg_sq", "buffer",
    "activation_output", "activation_input", "activation_grad_output",
)  # fmt: skip
LAYOUTS = [((0,), "float32", 0), ((1,), "float16", 1), ((4, 4), "int64", 16), ((), "float64", 1), ((8,), "bool", 8)]
SCALARS = ("loss", "learning_rate", "loss_scale", "found_inf", "step_seconds", "option", "setting", "training_mode")


@pytest.mark.parametrize("share", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("alike", [False, True])
def test_no_number_of_a_broken_training_ends_a_rule_or_makes_a_warning(share, alike):
    """A recorder in a thread shares the training's terminal; pytest raises NumPy's warnings."""
    draw, records = np.random.default_rng(3), Records()
    layouts = [records.table.layout_id(Layout(shape, dtype, n)) for shape, dtype, n in LAYOUTS]
    keys = [(scalar, scalar) for scalar in SCALARS] + [("input.0", "activation_input")]
    keys += [(f"blocks.{i}.fc.weight", quantity) for i in range(2) for quantity in QUANTITIES]
    for value in HOSTILE if alike else [None] * 4:
        detection = Detection(records.table)
        for step in range(60):
            record = records.step(step, {key: float(np.exp(0.1 * draw.standard_normal())) for key in keys})
            if step >= 30:
                where = draw.random(record.values.shape) < share
                record.values[where] = draw.choice(HOSTILE, size=where.sum()) if value is None else value
                record.layouts[:] = draw.choice([records.layout, *layouts], size=len(record))
            detection.judge(record)
            detection.certain(record)


def raising(record, table):
    raise ZeroDivisionError("planted")


def no_finding(record, table):
    return [None]


def no_number(record, table):
    return [Finding(0, 0, "spike", "own", "norm", None, 1.0, 9.0)]


@pytest.mark.parametrize("planted", [raising, no_finding, no_number])
def test_a_rule_that_fails_is_named_and_ends_no_other(planted):
    records, failed = Records(), []
    detection = Detection(records.table, own=[planted], failed=lambda *found: failed.append(found))
    assert healthy(records, detection, 40, (W,)) == []
    [(name, _)] = failed
    assert name == f"{__name__}:{planted.__name__}"
    assert [found.kind for found in detection.judge(records.step(40, {W: NAN}))] == ["nonfinite"]
    with pytest.raises((ZeroDivisionError, TypeError)):
        Detection(records.table, own=[planted]).judge(records.step(0, {W: 1.0}))


def test_what_a_rule_that_has_failed_had_learned_is_not_saved(monkeypatch):
    records = Records()
    detection = Detection(records.table, failed=lambda *found: None)
    assert LearningRateRule.state_key in detection.state()
    monkeypatch.setattr(LearningRateRule, "judge", raising)
    assert healthy(records, detection, 3, (W,)) == []
    assert LearningRateRule.state_key not in detection.state()
    resumed = Detection(records.table)
    resumed.load(detection.state())
    monkeypatch.undo()
    assert healthy(records, resumed, 3, (W,), start=3) == []
