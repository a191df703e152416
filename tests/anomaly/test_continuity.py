"""A weight is what it was, plus its update."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from step_records import Records
from tiny_models import EVERY_STEP, mlp

import trainsentry
from trainsentry.anomaly.continuity import HELD_FOR, ContinuityRule
from trainsentry.collectors.statistics import MEAN

STEPS = 2 * HELD_FOR + 8


class Weights:
    """Weights that move by their updates; `off` is what else has changed one, by name."""

    def __init__(self, names=("a", "b", "c", "d", "e")):
        self.names, self.records = names, Records()
        self.means, self.random = dict.fromkeys(names, 0.1), np.random.default_rng(0)
        self.judge = ContinuityRule(self.records.table).judge

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
                found += self.judge(record, np.full(len(record), 16.0))
            for (name, _, _), by in moves.items():
                self.means[name] += by * update
        return found

    def named(self, found):
        return [self.records.table.series[f.series_id].name for f in found]


def test_a_weight_that_something_else_has_changed_is_named_at_once_and_once():
    weights = Weights()
    for step in range(STEPS):
        found = weights.step(step, {"c": 0.01} if step == STEPS - 5 else {})
        assert weights.named(found) == (["c"] if step == STEPS - 5 else [])
    assert found == []


@pytest.mark.parametrize("number", [2, 5])
def test_what_changes_most_weights_at_once_is_intended(number):
    weights = Weights()
    names = weights.names[:number]
    for step in range(STEPS):
        found = weights.step(step, dict.fromkeys(names, 0.01) if step == STEPS - 1 else {})
    assert weights.named(found) == (list(names) if number == 2 else [])


def test_weights_that_are_clipped_after_each_update_are_left_alone_and_now_and_then_are_told_ever_more_seldom():
    weights = Weights()
    assert not [f for step in range(STEPS) for f in weights.step(step, {"a": 0.01 * (1 + step % 7)})]
    weights = Weights()
    times = [step for step in range(1000) if weights.step(step, {"a": 0.01} if step % 20 == 19 else {})]
    assert len(times) < 5


def test_steps_that_were_not_sampled_skipped_or_went_back_tell_nothing():
    weights = Weights()
    for step in range(STEPS):
        assert weights.step(step) == []
    assert weights.step(STEPS + 1, {"a": 0.5}) == [], "one step in between is unknown"
    assert weights.step(STEPS + 2, update=False) == []
    assert weights.step(STEPS + 3, {"a": 0.5}) == [], "there was no update"
    assert weights.step(3, {"a": 0.5}) == [], "the run has gone back"


def test_several_updates_within_a_step_are_no_gap():
    weights = Weights()
    assert not [f for step in range(STEPS) for f in weights.step(step, turns=2)]
    assert not [f for step in range(STEPS, 3 * STEPS) for f in weights.step(step, turns=1 + step % 2)]


def test_what_is_not_finite_is_left_to_others():
    weights = Weights()
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
    assert "something else than its update has changed parameter 0.weight before step 30" in incident.summary


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_healthy_runs_of_any_precision_are_silent(tmp_path, dtype, make):
    assert train(tmp_path, lambda *_: None, steps=120, dtype=dtype, make=make) == ()


def test_order_of_parts_does_not_matter():
    weights = Weights()
    for step in range(STEPS):
        weights.step(step)
    record = weights.records.step(STEPS, {("a", "parameter", 0): 4.0})
    record.values[:, MEAN] = 0.5
    [found] = weights.judge(replace(record, first_order=7), np.full(1, 16.0))
    assert found.series_id == record.ids[0]
