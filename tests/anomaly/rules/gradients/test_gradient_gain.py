"""A weight's gradient is about what its module's input and the gradient at its output make it."""

import numpy as np
import pytest
from step_records import Records

from trainsentry.anomaly.rules.gradients.gradient_gain import NEVER_ZERO_FOR, SAMPLES, SETTLES, GradientGainRule
from trainsentry.collectors.series import Layout
from trainsentry.collectors.statistics import NORM

MODULES = [f"layers.{i}" for i in range(12)]
AT = SAMPLES + SETTLES + 20


class Gains:
    """Records of modules whose inputs and gradients swing tenfold, and whose gains swing by a tenth."""

    def __init__(self, alone, leaf="weight"):
        self.leaf = leaf
        self.records, self.draw = Records(), np.random.default_rng(0)
        self.records.layout = self.records.table.layout_id(Layout((8, 8), "float32", 64))
        self.judge = alone(GradientGainRule, self.records.table)

    def step(self, step, factors=(), parts=1, modes=()):
        """Judge a record; `factors` are those of some modules' gradients."""
        inputs = {(f"{m}.input.0", "activation_input"): 1.0 for m in MODULES}
        outputs = {
            (f"{m}{f'@{part}' if part else ''}.output.0", "activation_grad_output"): 1.0
            for m in MODULES
            for part in range(parts)
        }
        gradients = {(f"{m}.{self.leaf}", "gradient"): 1.0 for m in MODULES}
        record = self.records.step(step, {**inputs, **outputs, **gradients, **{(m, m): 0.0 for m in modes}})
        n = len(MODULES)
        got_in, got_out = self.draw.uniform(1, 10, n), self.draw.uniform(1, 10, n)
        gains = np.exp(0.05 * self.draw.standard_normal(n)) * np.array([dict(factors).get(m, 1.0) for m in MODULES])
        clipped = self.draw.uniform(0.1, 1)
        record.values[:n, NORM] = got_in
        record.values[n : n + n * parts, NORM] = np.repeat(got_out, parts) / np.sqrt(parts)
        record.values[n + n * parts : 2 * n + n * parts, NORM] = got_in * got_out * gains * clipped
        return self.judge(record)


@pytest.fixture
def gains(alone):
    return Gains(alone)


@pytest.mark.parametrize("factor", [lambda s: 2.0, lambda s: 1.07 ** (s - AT)])
def test_a_lasting_factor_and_growth_by_some_percent_a_step_are_told_with_their_weight(gains, factor):
    assert [f for s in range(AT) for f in gains.step(s)] == []
    [found] = [f for s in range(AT, AT + 26) for f in gains.step(s, {"layers.2": factor(s)}.items())]
    assert (gains.records.table.series[found.series_id].name, found.kind) == ("layers.2.weight", "shift")
    assert AT - 1 <= found.step <= AT + 12


def test_a_gain_that_grows_little_by_little_in_a_young_run_is_no_fault(gains):
    """As a layer begins to learn: 1.8-fold within 12 steps, or twofold within 25."""
    young = SAMPLES + SETTLES - 10
    for s in range(young + 60):
        quick, slow = 1.8 ** min(max(s - young, 0) / 12, 1), 2.0 ** min(max(s - young, 0) / 25, 1)
        assert gains.step(s, [("layers.2", quick), ("layers.5", slow)]) == []


def test_a_gain_that_grows_furthest_where_many_grow_is_no_fault(gains):
    """Training changes many layers together, one of them most."""
    grown = {f"layers.{i}": 1.07 for i in range(5)} | {"layers.0": 1.08}
    for s in range(AT + 40):
        steps = min(max(s - AT, 0), 12)
        assert gains.step(s, [(m, factor**steps) for m, factor in grown.items()]) == []


def test_a_gradient_of_zero_is_told_at_once(gains):
    assert [f for s in range(NEVER_ZERO_FOR + 1) for f in gains.step(s)] == []
    assert gains.step(NEVER_ZERO_FOR + 1, [("layers.2", 0.0)]) == []
    [found] = gains.step(NEVER_ZERO_FOR + 2)
    assert (found.kind, found.step, found.value) == ("underflow", NEVER_ZERO_FOR + 1, 0.0)


def test_what_many_layers_do_together_is_no_fault(gains):
    many = [(m, 2.0) for m in MODULES[:5]]
    assert [f for s in range(AT) for f in gains.step(s)] == []
    assert [f for s in range(AT, AT + 40) for f in gains.step(s, many)] == []


@pytest.mark.parametrize("switched", [True, False])
def test_norms_that_are_switched_to_evaluation_change_gains_by_right(gains, switched):
    assert [f for s in range(AT) for f in gains.step(s)] == []
    modes = ["training_mode.norm"] if switched else []
    found = gains.step(AT, {"layers.2": 2.0}.items(), modes=modes)
    found += [f for s in range(AT + 1, AT + 80) for f in gains.step(s, {"layers.2": 2.0}.items())]
    assert len(found) == (not switched)


def test_a_gain_that_falls_is_no_fault(gains):
    assert [f for s in range(AT) for f in gains.step(s)] == []
    assert [f for s in range(AT, AT + 40) for f in gains.step(s, [("layers.2", 0.3)])] == []


def test_a_weight_of_a_module_of_several_layers_is_not_followed(alone):
    gains = Gains(alone, "in_proj_weight")
    assert [f for s in range(AT + 40) for f in gains.step(s, [("layers.2", 3.0)] if s >= AT else [])] == []


def test_spikes_and_other_numbers_of_calls_are_no_fault(gains):
    spikes = lambda s: [("layers.2", 5.0)] if s % 5 == 0 else []  # noqa: E731
    assert [f for s in range(2 * AT) for f in gains.step(s, spikes(s) if s > AT else [])] == []
    found = [f for s in range(2 * AT, 2 * AT + 30) for f in gains.step(s, [("layers.2", 3.0)], parts=2)]
    assert found == []
