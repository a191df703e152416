"""A weight changes by its update, and by nothing else."""

import logging

import numpy as np
import pytest
import torch
from step_records import Records
from tiny_models import EVERY_STEP, mlp

import trainsentry
from trainsentry.anomaly.finding import ALL
from trainsentry.anomaly.rules.optimizer.weight_continuity import HELD_FOR, WAIT, WeightContinuityRule
from trainsentry.collectors.series import Layout
from trainsentry.collectors.statistics import MAX, MEAN

STEPS = 2 * HELD_FOR + 8


class Weights:
    """Weights that move by their updates; `off` are other changes, by name."""

    def __init__(self, alone, names=("a", "b", "c", "d", "e")):
        self.names, self.records = names, Records()
        self.high = 0.0
        self.means, self.random = dict.fromkeys(names, 0.1), np.random.default_rng(0)
        self.judge = alone(WeightContinuityRule, self.records.table)

    def step(self, number, off=None, *, turns=1, update=True):
        """Return what is found at a step."""
        found = []
        for name, by in (off or {}).items():
            self.means[name] += by
        for turn in range(turns):
            before = {(n, "parameter", turn): m for n, m in self.means.items()}
            moves = {(n, "update", turn): self.random.normal() * 1e-3 for n in self.names}
            for means in (before, moves) if update else (before,):
                record = self.records.step(number, dict.fromkeys(means, 4.0))
                record.values[:, MEAN] = list(means.values())
                record.values[:, MAX] = self.high or self.random.normal()
                found += self.judge(record)
            for (name, _, _), by in moves.items():
                self.means[name] += by * update
        return found

    def named(self, found):
        return [self.records.table.series[f.series_id].name for f in found]


def test_a_weight_that_was_modified_otherwise_is_named_once_with_its_step(alone):
    weights = Weights(alone)
    for step in range(STEPS):
        found = weights.step(step, {"c": 0.01} if step == STEPS - 5 else {})
        assert weights.named(found) == (["c"] if step == STEPS - 5 + WAIT else [])
        assert [(f.step, f.last_clean) for f in found] == [(STEPS - 5, STEPS - 6)] * len(found)


@pytest.mark.parametrize("number", [1, 2, 5])
def test_what_changes_several_weights_at_once_is_intended_and_leaves_the_rule_as_it_was(number, alone):
    weights = Weights(alone)
    names, found = weights.names[:number], []
    for step in range(STEPS):
        found += weights.step(step, dict.fromkeys(names, 0.5) if step == STEPS - 5 else {})
    assert weights.named([f for f in found if f.alarm]) == (list(names) if number == 1 else [])
    assert [(f.name, f.last_clean) for f in found if not f.alarm] == [(ALL, STEPS - 6)] * (number == 5)
    off = {9 * STEPS: {"b": 0.01}}
    found = [f for step in range(STEPS, 10 * STEPS) for f in weights.step(step, off.get(step))]
    assert weights.named(found) == ["b"]


@pytest.mark.parametrize(("number", "is_found"), [(2, True), (4, True), (5, False), (8, False), (16, False)])
def test_a_few_of_many_weights_at_once_are_a_mix_up_and_most_are_intended(number, is_found, alone):
    weights = Weights(alone, [f"w{i}" for i in range(16)])
    names, found = weights.names[:number], []
    for step in range(STEPS):
        found += weights.step(step, dict.fromkeys(names, 0.5) if step == STEPS - 5 else {})
    assert weights.named([f for f in found if f.alarm]) == (names if is_found else [])
    assert {f.step for f in found if f.alarm} <= {STEPS - 5}


def by_rate(step):
    return 0.02 * (1 - step / 500)


@pytest.mark.parametrize(
    ("off", "most"),
    [
        (lambda step: 0.01 * (1 + step % 7), 0),  # rescaled at every step
        (lambda step: 2e-6, 0),
        (lambda step: 0.5 * 0.9**step, 0),  # rescaled, by ever less
        (lambda step: max(by_rate(step), 0.0), 0),
        (lambda step: 0.01 if step > 111 else 0.0, 0),  # a bound that is reached in the course of training
        (lambda step: 0.01 if step > 111 and step % 3 else 0.0, 0),
        (lambda step: 0.01 if step % 20 == 19 else 0.0, 1),
        (lambda step: 0.01 if step % 100 == 99 else 0.0, 1),
    ],
)
def test_loops_that_rescale_or_clip_a_weight_are_left_alone_or_reported_once(off, most, alone):
    weights = Weights(alone)
    times = [step for step in range(1000) if weights.step(step, {"a": off(step)})]
    assert len(times) <= most


def test_a_weight_that_has_come_to_a_bound_and_stays_there_is_clipped(alone):
    weights = Weights(alone)
    for step in range(STEPS):
        weights.high = 1.5 if step >= STEPS - 6 else 2.0 + step / 100
        assert weights.step(step, {"a": 0.01} if step == STEPS - 6 else {}) == []


def test_steps_that_were_not_sampled_skipped_or_went_back_tell_nothing(alone):
    weights = Weights(alone)
    for step in range(STEPS):
        assert weights.step(step) == []
    assert weights.step(STEPS + 1, {"a": 0.5}) == [], "one step in between is unknown"
    assert weights.step(STEPS + 2, update=False) == []
    assert weights.step(STEPS + 3, {"a": 0.5}) == [], "there was no update"
    assert weights.step(3, {"a": 0.5}) == [], "the run has gone back"


def test_several_updates_within_a_step_are_no_gap(alone):
    weights = Weights(alone)
    assert not [f for step in range(STEPS) for f in weights.step(step, turns=2)]
    assert not [f for step in range(STEPS, 3 * STEPS) for f in weights.step(step, turns=1 + step % 2)]


def test_what_is_not_finite_is_left_to_others(alone):
    weights = Weights(alone)
    for step in range(STEPS):
        weights.step(step)
    assert weights.step(STEPS, {"a": float("nan")}) == []
    weights.means["a"] = 0.1
    assert weights.step(STEPS + 1) == []


def train(tmp_path, change, steps=40, dtype=torch.float32, make=torch.optim.AdamW):
    torch.manual_seed(0)
    model = mlp().to(dtype)
    optimizer = make(model.parameters(), lr=1e-3)
    config = {"output_dir": str(tmp_path), "on_incident": {"dump": False}, "collect": EVERY_STEP}
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        for step in range(steps):
            with torch.no_grad():
                change(step, model)
            model(torch.randn(32, 8, dtype=dtype)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        monitor.flush()
        return monitor.incidents


def negate(step, model):
    if step == 30:
        model[0].weight.neg_()


def bump(step, model):
    if step == 30:
        model[0].weight[3, 3] += 0.01


@pytest.mark.parametrize("change", [negate, bump])
def test_in_a_run_a_negated_matrix_and_one_changed_element_are_seen_and_the_step_is_named(tmp_path, change, caplog):
    caplog.set_level(logging.CRITICAL, "trainsentry")
    [incident] = train(tmp_path, change)
    assert (incident.name, incident.quantity, incident.first_seen) == ("0.weight", "parameter", 30)
    assert (
        "parameter 0.weight was modified outside the optimizer update before step 30: its mean is" in incident.summary
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_healthy_runs_of_any_precision_are_silent(tmp_path, dtype, make):
    assert train(tmp_path, lambda *_: None, steps=120, dtype=dtype, make=make) == ()


def swap_averages(step, model):
    if step % 10 == 9:  # an evaluation with averaged weights, and back
        kept = [p.clone() for p in model.parameters()]
        for p in model.parameters():
            p.mul_(0.9)
        for p, before in zip(model.parameters(), kept, strict=True):
            p.copy_(before)


def clamp_one(step, model):
    model[2].bias.clamp_(max=0.02)


def load_another(step, model):
    if step == 30:
        model.load_state_dict({k: v * -3.0 for k, v in model.state_dict().items()})


def test_other_weights_that_were_swapped_in_are_the_first_suspect_of_what_follows(tmp_path, caplog):
    caplog.set_level(logging.CRITICAL, "trainsentry")
    [incident] = train(tmp_path, load_another)
    assert (incident.name, incident.quantity, incident.step) == (ALL, "parameter", 30)
    assert "most parameters were modified outside the optimizer update before step 30" in incident.summary
    assert len(incident.suspects) > 1  # it is no alarm of its own


def scale_slightly(step, model):
    if step == 30:
        for p in model.parameters():
            p.mul_(1.001)


def reset_head(step, model):
    if step == 30:
        torch.nn.init.normal_(model[2].weight)
        torch.nn.init.zeros_(model[2].bias)


@pytest.mark.parametrize("change", [swap_averages, clamp_one, scale_slightly, reset_head])
def test_what_loops_do_to_weights_on_purpose_is_not_reported(tmp_path, change):
    incidents = train(tmp_path, change, steps=80)
    assert not [s for i in incidents for s in i.suspects if "outside the optimizer update" in s.evidence]


class _Kept:
    """Puts a weight back to what it was before each update from step 30 on."""

    def __init__(self):
        self.weight = None

    def __call__(self, step, model):
        if self.weight is not None:
            model[0].weight.copy_(self.weight)
        if step >= 30:
            self.weight = model[0].weight.clone()


def disturb(step, model):
    if step >= 30:
        model[0].weight.add_(torch.randn_like(model[0].weight), alpha=1e-3)


def creep(step, model):
    if step >= 30:
        model[0].bias.mul_(1.01)


@pytest.mark.parametrize(
    ("make_change", "name", "kind", "says"),
    [
        (_Kept, "0.weight", "frozen", "parameter 0.weight is exactly what it was at step 30: its updates are lost"),
        (lambda: disturb, "0.weight", "shift", "was modified outside the optimizer update before step 30"),
        (lambda: creep, "0.bias", "shift", "was modified outside the optimizer update before step 30"),
    ],
)
def test_a_weight_that_something_changes_at_every_step_is_named(tmp_path, make_change, name, kind, says, caplog):
    caplog.set_level(logging.CRITICAL, "trainsentry")
    [incident] = train(tmp_path, make_change(), steps=50)
    assert (incident.name, incident.kind) == (name, kind)
    assert says in incident.summary


def bound_rows(step, model):
    model[0].weight.renorm_(2, 0, 0.62)


def bound_norm(step, model):
    if step >= 30:
        model[0].weight.mul_(2.0 / model[0].weight.norm())


@pytest.mark.parametrize("change", [bound_rows, bound_norm])
def test_a_weight_that_a_loop_holds_at_a_norm_is_left_alone(tmp_path, change):
    incidents = train(tmp_path, change, steps=80)
    assert not [s for i in incidents for s in i.suspects if "outside the optimizer update" in s.evidence]


def test_embeddings_that_come_to_their_largest_norm_are_left_alone(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(64, 8, max_norm=0.35), torch.nn.Flatten(), torch.nn.Linear(32, 64))
    torch.nn.init.normal_(model[0].weight, std=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with trainsentry.TrainMonitor({"output_dir": str(tmp_path), "collect": EVERY_STEP}).watch(model, optimizer) as m:
        for _ in range(120):
            x = torch.randint(64, (16, 4))
            torch.nn.functional.cross_entropy(model(x), x.sum(1) % 64).backward()
            optimizer.step()
            optimizer.zero_grad()
        m.flush()
        assert (model[0].weight.norm(dim=1) > 0.34).sum() > 4, "the bound is reached"
        assert not [s for i in m.incidents for s in i.suspects if "outside the optimizer update" in s.evidence]


def test_complex_weights_are_left_alone(alone):
    weights = Weights(alone, ("a",))
    weights.records.layout = weights.records.table.layout_id(Layout((16,), "complex64", 16))
    assert not [f for step in range(100) for f in weights.step(step, {"a": 0.01} if step == 50 else {})]


@pytest.mark.parametrize(
    ("norms", "largest", "found"),
    [
        ((4.0, 4.1, 4.2), (1.0, 1.1, 1.2), True),
        ((4.0, 4.0, 4.0), (1.0, 1.1, 1.2), False),
        ((4, 4.1, 4.2), (1,) * 3, False),
    ],
    ids=["pulled", "held at a norm", "held at a bound"],
)
def test_a_weight_that_something_writes_to_again_and_again_is_an_alarm_unless_it_is_held(alone, norms, largest, found):
    """By default weights are sampled too seldom for their means to tell."""
    records = Records()
    rule, told = alone(WeightContinuityRule, records.table), []
    for step in range(60):
        given = {("outside_writes.0.weight",) * 2: 1.0} if step == 30 else {}
        if 41 <= step < 44:
            given = {("written_norm.0.weight",) * 2: float(norms[step - 41])}
            given |= {("written_largest.0.weight",) * 2: float(largest[step - 41])}
        told += rule(records.step(step, given))
    assert {(f.name, f.step or 30) for f in told} == {("0.weight", 30)}
    assert [f.alarm for f in told] == [False, True][: 1 + found]
