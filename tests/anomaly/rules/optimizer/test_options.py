"""An option that changes against its schedule is named with both values; what schedules do is not."""

import json
import math

import pytest
import torch
from step_records import Records

from trainsentry.anomaly.rules.optimizer.options import OptionRule
from trainsentry.collectors.series import NO_OPTION
from trainsentry.collectors.torch.parameters.options import options_of

LR = ("option.0.0.lr", "option.0.0.lr")
OTHER = ("option.0.1.lr", "option.0.1.lr")
DECAY = ("option.0.0.weight_decay", "option.0.0.weight_decay")
STEPS = 400


def cosine(step, steps=STEPS):
    """A warm-up of 20 steps and a cosine to zero."""
    return 1e-3 * min((step + 1) / 20, 1) * 0.5 * (1 + math.cos(math.pi * min(step / steps, 1)))


def one_cycle(step):
    """Up over 120 steps, then down, each by a cosine."""
    up = min(step / 120, 1)
    down = max(0, (step - 120) / (STEPS - 120))
    return 1e-3 * (0.04 + 0.96 * 0.5 * (1 - math.cos(math.pi * up))) * 0.5 * (1 + math.cos(math.pi * down)) + 1e-9


SHORT = 300
"""Steps of a schedule that was made for fewer steps than are trained."""


SCHEDULES = {
    "constant": lambda s: 1e-3,
    "cosine": cosine,
    "one cycle": one_cycle,
    "steps": lambda s: 0.1 * 0.1 ** (s // 100),
    "halves": lambda s: 0.1 * 0.5 ** (s // 40),
    "restarts": lambda s: 1e-5 + 1e-3 * 0.5 * (1 + math.cos(math.pi * (s % 100) / 100)),
    "linear": lambda s: 1e-3 * max(0, 1 - s / (STEPS - 1)),
    "plateau, then linear": lambda s: 1e-3 * min(1, (STEPS - s) / 40),
    "root": lambda s: 1e-3 * min((s + 1) / 40, (40 / (s + 1)) ** 0.5),
    "exponential": lambda s: 1e-3 * 0.99**s,
    "triangles": lambda s: 1e-4 + 9e-4 * abs((s % 60) / 30 - 1),
    "cosine with a drop": lambda s: cosine(s) * (0.2 if s >= 200 else 1),
    "cosine by epoch": lambda s: 1e-3 * 0.5 * (1 + math.cos(math.pi * (s // 20) / 20)),
}


def run(alone, judged, series, steps=range(STEPS), rule=None, records=None):
    """Return the findings over steps; as the collector does, only changes have a row."""
    records = records or Records()
    rule = rule or alone(OptionRule, records.table)
    last = {}

    def changes(step):
        now = {key: value(step) for key, value in series.items()}
        new = {key: value for key, value in now.items() if last.get(key) != value}
        last.update(now)
        return new

    return judged(rule, records, steps, changes)


def test_a_rate_that_climbs_above_all_that_it_was_is_told_with_its_first_rise(alone, judged):
    """The schedule's factor has the wrong sign from step 200 on."""
    [found] = run(alone, judged, {LR: lambda s: cosine(s) * 1.06 ** max(s - 199, 0)}, range(230))
    assert (found.step, found.statistic) == (200, "climb")
    assert 1.2e-3 < found.value < 1.4e-3


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_quiet(alone, judged, name):
    assert run(alone, judged, {LR: SCHEDULES[name], OTHER: lambda s: 0.3 * SCHEDULES[name](s)}) == []


@pytest.mark.parametrize("name", ["constant", "cosine", "steps", "one cycle"])
@pytest.mark.parametrize(
    ("at", "fault"),
    [
        (157, lambda rate, s: rate(s) * (10 if s == 157 else 1)),
        (157, lambda rate, s: rate(s) * (0 if s >= 157 else 1)),
        (157, lambda rate, s: rate(s) * (-1 if s >= 157 else 1)),
        (157, lambda rate, s: rate(s) * (10 if s >= 157 else 1) if s < 200 else rate(157) * 10),
    ],
    ids=["for one step", "zero", "negative", "ten times"],
)
def test_a_rate_that_leaves_its_schedule_is_found_at_its_step(alone, judged, name, at, fault):
    found = run(alone, judged, {LR: lambda s: fault(SCHEDULES[name], s)}, range(200))
    if name == "steps" and not found:
        pytest.skip("ten times the present rate is an earlier rate of this schedule")
    assert found[0].step == at
    assert found[0].quantity == "optimizer"
    assert found[0].name == "lr of group 0"


def test_a_schedule_that_is_stepped_twice_or_starts_anew_is_found(alone, judged):
    [twice, *_] = run(alone, judged, {LR: lambda s: cosine(s if s < 150 else 150 + 2 * (s - 150))}, range(200))
    assert (twice.statistic, 150 <= twice.step <= 155) == ("pace", True)
    [anew, *_] = run(alone, judged, {LR: lambda s: cosine(s if s < 150 else s - 150)}, range(200))
    assert (anew.step, anew.expected) == (150, cosine(149))


def test_a_resumed_schedule_that_warms_up_again_is_found_and_dated_from_its_fall(alone, judged):
    def resumed(step):
        return cosine(step + 100) if step < 150 else 1e-3 * min((step - 149) / 20, 1)

    [found, *_] = run(alone, judged, {LR: resumed}, range(200))
    assert (found.step, found.statistic, found.last_clean) == (150, "anew", 149)
    assert (found.value, found.expected) == (pytest.approx(5e-5), cosine(249))


@pytest.mark.parametrize("after", [lambda s: 1e-4, lambda s: 1e-4 * 0.99**s, lambda s: 1e-4 + 1e-6 * (s % 4)])
def test_a_smooth_rate_that_falls_and_does_not_climb_follows_its_schedule(alone, judged, after):
    assert run(alone, judged, {LR: lambda s: cosine(s + 100) if s < 150 else after(s - 150)}, range(220)) == []


@pytest.mark.parametrize(
    "cycle",
    [
        lambda s: 1e-4 if s < 10 else 4e-4 + 6e-4 * 0.5 * (1 + math.cos(math.pi * (s - 10) / 90)),
        lambda s: 1e-4 + 9e-6 * s,
    ],
)
def test_a_schedule_of_cycles_that_fall_and_climb_is_told_once(alone, judged, cycle):
    def rate(step):
        place = (step + 30) % 100
        return cycle(place) * min((place + 1) / 10, 1)

    found = run(alone, judged, {LR: rate}, range(STEPS))
    assert len(found) <= 1


def test_a_group_that_parts_from_the_others_is_named(alone, judged):
    series = {LR: lambda s: cosine(s) * (0.9 if s >= 150 else 1), OTHER: lambda s: 0.3 * cosine(s)}
    [found] = run(alone, judged, series, range(200))
    assert (found.name, found.statistic, found.step) == ("lr of group 0", "groups", 150)
    assert found.expected == pytest.approx(cosine(150))


def test_a_group_that_falls_by_a_schedule_of_its_own_is_quiet(alone, judged):
    series = {LR: lambda s: 0.1, OTHER: lambda s: 0.1 * 0.95 ** (s // 30)}
    assert run(alone, judged, series, range(200)) == []


def test_a_group_that_rises_beside_others_that_stay_as_they_are_is_named(alone, judged):
    series = {LR: lambda s: 1e-3, OTHER: lambda s: 3e-4 * (1.15 if s >= 150 else 1)}
    [found] = run(alone, judged, series, range(200))
    assert (found.name, found.statistic, found.step) == ("lr of group 1", "groups", 150)
    assert found.expected == pytest.approx(3e-4)


def test_groups_that_fall_together_for_the_first_time_are_quiet(alone, judged):
    drop = lambda s: 0.1 if s >= 150 else 1.0  # noqa: E731
    series = {LR: lambda s: 1e-3 * drop(s), OTHER: lambda s: 3e-4 * drop(s)}
    assert run(alone, judged, series, range(200)) == []


@pytest.mark.parametrize(
    ("before", "after"), [(0.02, -0.02), (0.02, 0.2), (0.0, 0.1), (0.9, 0.999), (0.999, 0.9), (1e-8, 1e-2), (0.0, 1.0)]
)
def test_an_option_that_never_changed_must_not(alone, judged, before, after):
    [found] = run(alone, judged, {DECAY: lambda s: after if s >= 77 else before}, range(100))
    assert (found.value, found.expected, found.step, found.name) == (after, before, 77, "weight_decay of group 0")
    assert "step 77" in OptionRule.sentence(_anomaly(found), found.name)


def test_options_that_change_at_every_step_or_a_little_are_schedules(alone, judged):
    momentum = {DECAY: lambda s: 0.95 - 0.1 * one_cycle(s) / 1e-3}
    assert run(alone, judged, momentum) == []
    assert run(alone, judged, {DECAY: lambda s: 0.04 * 1.02 ** (s // 50)}) == []


@pytest.mark.parametrize("steps", [40, 140, 400])
def test_the_momentum_of_torch_s_one_cycle_is_a_schedule(alone, judged, steps):
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([weight])
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    options = []
    for _ in range(steps):
        options.append(dict(options_of(optimizer.param_groups[0])))
        optimizer.step()
        if len(options) < steps:
            cycle.step()
    keys = {key: (f"option.0.0.{key}", f"option.0.0.{key}") for key in ("lr", "betas.0", "betas.1")}
    series = {name: lambda s, key=key: options[s][key] for key, name in keys.items()}
    assert run(alone, judged, series, range(steps)) == []


def test_momentum_that_falls_at_once_in_the_midst_of_its_cycle_is_found(alone, judged):
    beta = {("option.0.0.betas.0", "option.0.0.betas.0"): lambda s: 0.95 - 0.1 * one_cycle(s) / 1e-3 - 0.4 * (s > 200)}
    [found, *_] = run(alone, judged, beta)
    assert found.step == 201


def test_a_resumed_run_goes_on_with_the_rate_that_was_saved(alone, judged):
    records = Records()
    rule = alone(OptionRule, records.table)
    assert run(alone, judged, {LR: cosine}, range(150), rule, records) == []
    same, other = alone(OptionRule, records.table), alone(OptionRule, records.table)
    same.rule.load(rule.rule.saved(0))
    other.rule.load(rule.rule.saved(0))
    assert run(alone, judged, {LR: cosine}, range(150, 200), same, records) == []
    [found] = run(alone, judged, {LR: lambda s: 2 * cosine(s)}, range(150, 200), other, records)
    assert (found.step, found.statistic) == (150, "largest")


def test_a_schedule_that_begins_anew_after_a_resume_is_found(alone, judged):
    records = Records()
    rule = alone(OptionRule, records.table)
    assert run(alone, judged, {LR: cosine}, range(150), rule, records) == []
    anew = alone(OptionRule, records.table)
    anew.rule.load(json.loads(json.dumps(rule.rule.saved(0))))
    warm_up = {LR: lambda s: cosine(s) if s == 150 else 1e-3 * (s - 150) / 20}  # the first step has the saved rate
    [found] = run(alone, judged, warm_up, range(150, 170), anew, records)
    assert (found.step, found.statistic, found.last_clean) == (151, "value", 150)


def test_options_that_an_earlier_version_saved_are_gone_on_with(alone, judged):
    records = Records()
    rule = alone(OptionRule, records.table)
    run(alone, judged, {LR: cosine}, range(150), rule, records)
    old = alone(OptionRule, records.table)
    old.rule.load({name: numbers[:7] for name, numbers in rule.rule.saved(0).items()})
    assert run(alone, judged, {LR: cosine}, range(150, 200), old, records) == []


def _anomaly(found):
    from trainsentry.anomaly.anomaly import Anomaly

    return Anomaly(
        found.step, 0, 0, 0, found.name, found.quantity, found.statistic, found.value, found.expected, found.score,
        found.detector, found.kind,
    )  # fmt: skip


def linear(step):
    return 1e-3 * (1 - step / STEPS)


RESUMED_AT = 120
"""A round step, at which many warm-ups end."""

AFTER = {
    "as it was": (lambda s, schedule: schedule(s), False),
    "a cosine that begins anew": (lambda s, schedule: schedule(RESUMED_AT) * from_its_top(s - RESUMED_AT), True),
    "a rate that stands still": (lambda s, schedule: schedule(RESUMED_AT), True),
}


def from_its_top(step):
    return 0.5 * (1 + math.cos(math.pi * step / STEPS))


@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize(
    ("schedule", "falls"),
    [
        (cosine, True),
        (linear, True),
        (lambda s: max(linear(s), linear(100)), False),
        (lambda s: 1e-3 * min((s + 1) / RESUMED_AT, 1), False),
        (lambda s: 1e-3, False),
    ],
    ids=["cosine", "linear", "a fall that had ended", "a warm-up that ends there", "constant"],
)
def test_a_rate_that_falls_is_to_fall_on_after_a_resume(alone, judged, schedule, falls, after):
    """A cosine that begins anew at the saved rate makes no jump, and falls a hundredth as fast."""
    records = Records()
    first = alone(OptionRule, records.table)
    assert run(alone, judged, {LR: schedule}, range(RESUMED_AT), first, records) == []
    resumed = alone(OptionRule, records.table)
    resumed.rule.load(json.loads(json.dumps(first.rule.saved(0))))
    goes_on, told = AFTER[after]
    steps = range(RESUMED_AT, RESUMED_AT + 30)
    found = run(alone, judged, {LR: lambda s: goes_on(s, schedule)}, steps, resumed, records)
    assert [(f.statistic, f.step) for f in found] == ([("slower", RESUMED_AT)] if told and falls else [])


def test_a_number_that_is_the_optimizers_own_state_is_none_after_a_resume_either(alone, judged):
    """As the distance that Prodigy estimates: it is known as such after the first update, and not before."""
    records, own = Records(), ("option.0.0.d",) * 2
    rule = alone(OptionRule, records.table)
    assert judged(rule, records, [0], {LR: 1.0, own: 1e-6}) == []
    assert judged(rule, records, [1], {own: NO_OPTION}) == []
    again = Records()
    resumed = alone(OptionRule, again.table)
    resumed.rule.load(json.loads(json.dumps(rule.rule.saved(0))))
    assert judged(resumed, again, [120], {LR: 1.0, own: 5e-4}) == []
    assert judged(resumed, again, [121], {own: NO_OPTION}) == []


def ends_early(step):
    return 1e-3 * max(0, 1 - step / SHORT)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (ends_early, [SHORT]),
        (lambda s: 0.0, [SHORT]),
        (lambda s: 1e-3, []),
        (lambda s: ends_early(s - 40), [SHORT + 40]),
    ],
    ids=["alike", "a frozen group", "a group that goes on", "a group that ends later"],
)
def test_rates_of_zero_are_told_of_once_where_no_group_has_another(alone, judged, other, told):
    """A scheduler that accelerate steps once for each process ends at half of the steps."""
    found = run(alone, judged, {LR: ends_early, OTHER: other})
    assert [(f.step, f.statistic) for f in found if f.statistic == "idle"] == [(step, "idle") for step in told]


def test_a_run_whose_rate_is_zero_from_the_start_or_for_its_last_step_is_no_finding(alone, judged):
    assert run(alone, judged, {LR: lambda s: 0.0}) == []
    assert run(alone, judged, {LR: lambda s: 1e-3 * max(0, 1 - s / (STEPS - 1))}) == []


def test_a_number_that_keeps_the_rate_of_before_is_no_option(alone, judged):
    """SpeechBrain's `prev_lr`, as its rate is annealed."""
    rate, kept = lambda s: 2e-3 * 0.8 ** (s // 100), lambda s: 2e-3 * 0.8 ** max(s // 100 - 1, 0)
    assert run(alone, judged, {LR: rate, ("option.0.0.prev_lr",) * 2: kept}) == []
    assert len(run(alone, judged, {LR: rate, ("option.0.0.prev_lr",) * 2: lambda s: 3e-3 if s > 200 else 2e-3})) == 1
    steps = lambda s: 1e-3 if s < 200 else 1e-4  # noqa: E731
    decayed = {DECAY: lambda s: 1e-2 if s < 300 else 1e-3}
    assert [f.step for f in run(alone, judged, {LR: steps, **decayed})] == [300], "it equals a rate, and was none"


def test_idle_rates_are_told_where_records_are_few_or_several_a_step_and_in_a_resumed_run(alone):
    records = Records()
    rule = alone(OptionRule, records.table)
    found = [
        f for s in range(0, SHORT + 100, 7) for f in rule(records.step(s, {LR: ends_early(s)} if s < SHORT + 7 else {}))
    ]
    assert [(f.statistic, f.step) for f in found] == [("idle", SHORT // 7 * 7 + 7)]
    again = alone(OptionRule, records.table)
    again.rule.load(json.loads(json.dumps(rule.rule.saved(0))))
    later = [f for s in range(SHORT + 100, SHORT + 200) for _ in range(2) for f in again(records.step(s, {LR: 0.0}))]
    assert [f.statistic for f in later] == ["idle"]


def test_an_optimizer_without_a_rate_beside_one_at_zero_trains(alone, judged):
    assert run(alone, judged, {LR: ends_early, ("option.1.0.eps.0",) * 2: lambda s: 1e-3}) == []


@pytest.mark.parametrize("declared", [True, False])
def test_another_stage_may_have_other_ratios_of_rates(alone, judged, declared):
    """As fastai's, which thaws layers and begins another cycle."""
    stage = {("stage", "stage"): lambda s: float(s >= 200)} if declared else {}
    other = {OTHER: lambda s: cosine(s) / (20 if s >= 200 else 2)}
    found = run(alone, judged, {LR: cosine, **other, **stage})
    assert [f.statistic for f in found if f.step == 200 and f.statistic == "groups"] == ["groups"] * (not declared)
