"""Invariants: each rule says what it is for, and nothing else."""

from dataclasses import replace

import numpy as np
import pytest
from step_records import Records

from trainsentry.anomaly.across_ranks.reductions import ReductionRule
from trainsentry.anomaly.detection import Detection
from trainsentry.anomaly.rules.constant_data import ConstantDataRule
from trainsentry.anomaly.rules.frozen import FrozenRule
from trainsentry.anomaly.rules.layer_outliers import LayerOutlierRule
from trainsentry.anomaly.rules.lost_state import LostStateRule
from trainsentry.anomaly.rules.state_reset import StateResetRule
from trainsentry.anomaly.rules.switches import SwitchRule
from trainsentry.anomaly.rules.weight_continuity import WeightContinuityRule
from trainsentry.collectors.series import Layout
from trainsentry.collectors.statistics import MAX, MEAN, MIN, VALUE, ZEROS

U, G = ("fc.weight", "update"), ("fc.weight", "gradient")
OTHER = ("head.weight", "update")
RATE = ("learning_rate", "learning_rate")
COUNT = ("updated_parameters", "updated_parameters")
SQUARES, WEIGHT = ("fc.weight", "exp_avg_sq"), ("fc.weight", "parameter")
RULES = {
    "frozen": lambda table: FrozenRule(table).judge,
    "missing_state": lambda table: LostStateRule(table).judge,
    "state_reset": lambda table: StateResetRule(table).judge,
    "constant_data": lambda table: lambda record: ConstantDataRule(table).judge(record, np.full(len(record), 256.0)),
    "continuity": lambda table: lambda record: WeightContinuityRule(table).judge(record, np.full(len(record), 16.0)),
    "switches": lambda table: SwitchRule(table).judge,
    "siblings": lambda table: lambda record: LayerOutlierRule(table).judge(record, np.full(len(record), 16.0)),
    "detection": lambda table: Detection(table).judge,
}


def judged(rule, records, steps, sizes, **flags):
    found = []
    for step in steps:
        found += rule(records.step(step, sizes(step) if callable(sizes) else sizes, **flags))
    return found


@pytest.mark.parametrize("name", RULES)
def test_every_rule_takes_whatever_a_record_may_be(name):
    records = Records()
    rule = RULES[name](records.table)
    assert rule(records.step(0, {})) == []
    series = [U, G, RATE, COUNT, SQUARES, WEIGHT, ("layers.0.output.0", "activation_output"), ("loss", "loss")]
    for step in range(5):
        assert rule(records.step(2 * step, dict.fromkeys(series[: step + 3], 1.0))) == []
        assert rule(records.step(2 * step, dict.fromkeys(series[step:], 1.0))) == [], "a step may come in parts"
    rule(records.step(20, dict.fromkeys(series, float("nan"))))
    rule(records.step(21, dict.fromkeys(series, 0.0), skipped=True))
    found = judged(rule, records, range(30, 60), dict.fromkeys(series, 1.0))
    assert not [f for f in found if getattr(f, "step", None) and f.step > 35], "it is alive, and silent again"


@pytest.mark.parametrize(("numel", "found_after"), [(16, 1), (2, 3)])
def test_a_tensor_of_a_few_numbers_may_stand_still_for_a_moment(numel, found_after):
    """As the sign of its average turns, the update of a number passes zero, and may be rounded away."""
    records = Records()
    rule = FrozenRule(records.table).judge
    layout = records.table.layout_id(Layout((numel,), "float32", numel))

    def found_in(steps, size):
        parts = [replace(records.step(step, {G: 1.0, U: size}), layouts=np.full(2, layout)) for step in steps]
        return [len(rule(part)) for part in parts]

    assert not any(found_in(range(12), 1.0))
    if found_after > 1:
        assert not any(found_in(range(12, 12 + found_after - 1), 0.0))
        assert not any(found_in(range(14, 26), 1.0))
    found = found_in(range(26, 30), 0.0)
    assert found == [int(n == found_after) for n in range(1, 5)]


def test_an_update_of_zero_is_frozen_once_and_not_where_the_gradient_is_zero_or_the_step_was_skipped():
    records = Records()
    rule = FrozenRule(records.table).judge
    assert judged(rule, records, range(12), {G: 1.0, U: 1.0}) == []
    assert judged(rule, records, [12], {G: 0.0, U: 0.0}) == []
    assert judged(rule, records, range(13, 25), {G: 1.0, U: 1.0}) == []
    assert judged(rule, records, [25], {G: 1.0, U: 0.0}, skipped=True) == []
    assert judged(rule, records, range(26, 38), {G: 1.0, U: 1.0, RATE: 1.0}) == []
    assert judged(rule, records, [38], {G: 1.0, U: 0.0, RATE: 0.0}) == []
    assert judged(rule, records, range(39, 51), {G: 1.0, U: 1.0, RATE: 1.0}) == []
    assert [f.kind for f in judged(rule, records, [51, 52, 53], {G: 1.0, U: 0.0, RATE: 1.0})] == ["frozen"]


def test_an_update_that_is_missing_is_frozen_and_so_is_a_step_without_any():
    records = Records()
    rule = FrozenRule(records.table).judge
    assert judged(rule, records, range(12), {U: 1.0, OTHER: 1.0, COUNT: 2.0}) == []
    [found] = judged(rule, records, range(12, 15), {OTHER: 1.0, COUNT: 1.0})
    assert (records.table.series[found.series_id].name, found.step) == ("fc.weight", 12)
    [found] = judged(rule, records, [15], {COUNT: 0.0})
    assert records.table.series[found.series_id].name == "updated_parameters"


def test_updates_that_are_sampled_seldom_are_not_missing_in_between():
    records = Records()
    rule = FrozenRule(records.table).judge
    sizes = lambda step: {U: 1.0, COUNT: 1.0} if step % 10 == 0 else {G: 1.0}  # noqa: E731
    assert judged(rule, records, range(300), sizes) == []


def test_one_parameter_of_many_that_never_moves_is_named_and_a_frozen_backbone_is_not():
    for frozen, expected in ((1, 1), (8, 0)):
        records = Records()
        rule = FrozenRule(records.table).judge
        weights = {(f"p{i}", "parameter"): 1.0 for i in range(10)}
        moving = {(f"p{i}", "update"): 1.0 for i in range(frozen, 10)}
        assert len(judged(rule, records, range(20), {**weights, **moving})) == expected


def test_squares_fall_no_faster_than_their_decay():
    records = Records()
    rule = StateResetRule(records.table).judge
    assert judged(rule, records, range(30), lambda s: {WEIGHT: 1.0, SQUARES: 0.95**s}) == []
    assert [f.kind for f in judged(rule, records, [30], {WEIGHT: 1.0, SQUARES: 1e-3})] == ["state_reset"]
    assert judged(rule, records, [31], {WEIGHT: 1.0, SQUARES: 1e-3}) == []
    record = records.step(32, {WEIGHT: 1.0, SQUARES: 1e-3})
    record.values[:, MIN] = -1e-9
    assert [f.statistic for f in rule(record)] == ["min"], "and are not negative"


def test_state_that_is_gone_while_weights_are_there():
    records = Records()
    rule = LostStateRule(records.table).judge
    momentum = ("fc.weight", "momentum_buffer")
    assert judged(rule, records, range(10), {WEIGHT: 1.0, momentum: 1.0}) == []
    [found] = judged(rule, records, [10, 11], lambda s: {WEIGHT: 1.0} if s == 10 else {WEIGHT: 1.0, momentum: 1.0})
    assert (found.kind, found.step) == ("state_reset", 10)


@pytest.mark.parametrize("lost", ["a", "b"])
def test_of_several_optimizers_the_one_that_lost_its_state_is_meant_also_where_it_alone_is_read(lost):
    records = Records()
    rule = LostStateRule(records.table).judge
    parts = {n: {(f"{n}.weight", "parameter"): 1.0, (f"{n}.weight", "momentum_buffer"): 1.0} for n in "ab"}
    for step in range(0, 60, 10):
        assert rule(records.step(step, parts["a"])) == []
        assert rule(records.step(step, parts["b"])) == []
    without = {key: 1.0 for key in parts[lost] if key[1] == "parameter"}
    assert rule(records.step(53, without)) == []
    [found] = rule(records.step(60, parts["a"]))
    assert (records.table.series[found.series_id].name, found.step) == (f"{lost}.weight", 53)
    assert judged(rule, records, range(61, 70), parts["a"]) == [], "weights that are not sampled lack nothing"


def test_state_that_is_sampled_more_seldom_than_weights_is_not_missing():
    records = Records()
    rule = LostStateRule(records.table).judge
    momentum = ("fc.weight", "momentum_buffer")
    both = {WEIGHT: 1.0, momentum: 1.0}
    assert judged(rule, records, range(60), lambda s: {WEIGHT: 1.0} if s % 2 else both) == []


@pytest.mark.parametrize(("count", "is_found"), [(7, True), (40, False), (111, False)])
def test_a_counter_that_begins_anew_is_lost_state_and_one_that_is_rolled_back_is_not(count, is_found):
    records = Records()
    rule = StateResetRule(records.table).judge
    counter = ("fc.weight", "step")
    assert judged(rule, records, range(0, 101, 10), lambda s: {counter: s + 1.0}) == []
    found = judged(rule, records, [110], {counter: float(count)})
    assert [(f.kind, f.expected) for f in found] == ([("state_reset", 111.0)] if is_found else [])


def test_a_learning_rate_above_all_before_and_a_restart_of_its_schedule():
    records = Records()
    rule = SwitchRule(records.table).judge
    warm_up = lambda s: {RATE: min(s + 1, 20) * 1e-4}  # noqa: E731
    assert judged(rule, records, range(40), warm_up) == []
    assert judged(rule, records, range(40, 50), {RATE: 1e-5}) == []
    assert judged(rule, records, [50], {RATE: 2e-3}) == [], "back to what was there"
    [found] = judged(rule, records, [51], {RATE: 6e-2})
    assert (found.kind, found.value) == ("update_size", 6e-2)


def test_the_optimizers_own_rate_is_looked_at_beside_the_one_that_is_logged():
    records = Records()
    table_rule = SwitchRule(records.table)
    own = ("optimizer_learning_rate", "optimizer_learning_rate")
    assert judged(table_rule.judge, records, range(20), {RATE: 1e-3, own: 1e-3}) == []
    again = SwitchRule(records.table)
    again.load(table_rule.saved())
    [found] = judged(again.judge, records, [20], {RATE: 1e-3, own: 3e-2})
    assert (found.kind, found.value, records.table.series[found.series_id].name) == ("update_size", 3e-2, own[0])


def test_a_loss_scale_that_collapses_is_said_once():
    records = Records()
    rule = SwitchRule(records.table).judge
    for step in range(60):
        assert rule(records.step(step, {G: 1.0}, skipped=step % 8 == 0)) == [], "a scaler at work"
    found = judged(rule, records, range(60, 90), {G: 1.0}, skipped=True)
    assert [f.kind for f in found] == ["loss_scale_collapse"]


def test_a_tensor_that_changes_its_dtype():
    from dataclasses import replace

    from trainsentry.collectors.series import Layout

    records = Records()
    rule = SwitchRule(records.table).judge
    assert judged(rule, records, range(3), {WEIGHT: 1.0}) == []
    half = records.table.layout_id(Layout((16,), "bfloat16", 16))
    record = records.step(3, {WEIGHT: 1.0})
    [found] = rule(replace(record, layouts=np.full(1, half, np.int32)))
    assert (found.kind, found.statistic) == ("dtype_change", "float32→bfloat16")


def test_a_layer_unlike_its_siblings_from_the_start():
    for size, kind in ((1e5, "shift"), (1e-5, "dead"), (10.0, None)):
        records = Records()
        rule = LayerOutlierRule(records.table)
        sizes = {(f"blocks.{i}.fc.output.0", "activation_output"): size if i == 2 else 1.0 + i / 10 for i in range(4)}
        found = []
        for step in range(20):
            found += rule.judge(records.step(step, sizes), np.full(4, 16.0))
        assert [f.kind for f in found] == ([kind] if kind else [])


def test_gradients_that_are_summed_where_they_were_averaged():
    tables = [Records(rank=r) for r in range(2)]
    rule = ReductionRule()
    names = [f"p{i}" for i in range(5)]
    random = np.random.default_rng(0)

    def step(number, factor):
        own = random.normal(size=(2, 5))
        for rank, records in enumerate(tables):
            record = records.step(number, {(n, q): 1.0 for q in ("gradient_unreduced", "gradient") for n in names})
            record.values[:, MEAN] = np.concatenate([own[rank], factor * own.mean(0)]) / 16
            rule.take(rank, records.table, record)
        return rule.judge(number, {0, 1})

    for number in range(15):
        assert step(number, 0.5 + random.uniform(0, 0.5)) == [], "clipping makes it smaller"
    [found] = step(15, 2.0)
    assert (found.kind, found.quantity) == ("communication_mismatch", "communication_output")
    assert found.value == pytest.approx(2.0)


DATA = ("input.0", "activation_input")


@pytest.mark.parametrize(
    ("history", "numel", "found"),
    [((-2.0, 2.0), 256, 1), ((0.0, 9.0), 256, 1), ((0.0, 1.0), 256, 0), ((3.0, 3.0), 256, 0), ((-2.0, 2.0), 16, 0)],
    ids=["pictures", "tokens", "a mask", "constant by design", "few numbers"],
)
def test_a_batch_of_one_value_is_no_data_unless_it_is_a_mask_or_always_was_so(history, numel, found):
    records = Records()
    rule = ConstantDataRule(records.table).judge

    def seen(step, low, high):
        record = records.step(step, {DATA: 1.0})
        record.values[:, [MIN, MAX]] = low, high
        return rule(record, np.full(1, float(numel)))

    assert not [f for step in range(20) for f in seen(step, *history)]
    assert len(seen(20, 1.0, 1.0)) == found
    assert seen(21, 1.0, 1.0) == [], "said once"
    assert seen(22, float("nan"), float("nan")) == []
    assert not [f for step in range(23, 90) for f in seen(step, *history)]
    assert seen(90, 1.0, 1.0) == [], "what was constant once may be"


def test_masks_behind_the_data_and_inputs_that_are_mostly_zero_may_be_constant():
    records = Records()
    rule = ConstantDataRule(records.table).judge
    mask = ("input.1", "activation_input")
    for step in range(40):
        record = records.step(step, {DATA: 1.0, mask: 1.0})
        record.values[:, [MIN, MAX, ZEROS]] = [[0.0, 9.0, 0.7], [-1e4, 0.0, 0.2]]
        if step == 30:
            record.values[1, [MIN, MAX, ZEROS]] = 0.0, 0.0, 1.0
        if step == 35:
            record.values[0, [MIN, MAX, ZEROS]] = 0.0, 0.0, 1.0
        assert rule(record, np.full(2, 256.0)) == []


def test_a_module_that_is_switched_to_evaluation():
    records = Records()
    name = "training_mode.blocks.0"
    record = records.step(5, {(name, name): 0.0})
    record.values[:, VALUE] = 0.0
    [found] = Detection(records.table).judge(record)
    assert (found.kind, found.quantity, found.alarm) == ("mode_change", "training", True)
