"""A loss that is logged behind the update is that of the step before."""

import logging

import pytest
import torch
from step_records import Records
from tiny_models import mlp

import trainsentry
from trainsentry.anomaly.detection import Detection
from trainsentry.monitor.offline.history import diagnose

LOSS, RATE = ("loss", "loss"), ("learning_rate", "learning_rate")
OUT, BACK, G = ("fc.output.0", "activation_output"), ("fc.input.0", "activation_grad_input"), ("fc.weight", "gradient")


def test_what_stands_before_the_forward_pass_belongs_to_the_step_before_it_and_behind_that_ones_forward_pass():
    records = Records()
    detection = Detection(records.table)
    for step in range(30):
        assert detection.judge(records.step(step, {LOSS: 1.0, RATE: 0.1, OUT: 1.0, BACK: 1.0, G: 1.0})) == []
    [bad] = detection.judge(records.step(30, {LOSS: float("nan"), RATE: 0.1, OUT: 1.0, BACK: 1.0, G: 1.0}))
    assert (bad.step, bad.order, bad.last_clean, bad.passed_on) == (29, 2, 28, False)
    found = detection.judge(records.step(31, {LOSS: 1.0, RATE: 30.0, OUT: 1.0, BACK: 1.0, G: 1.0}))
    assert [(a.name, a.step) for a in found] == [("learning_rate", 31)], "a rate may be logged as a step begins"


def test_it_is_passed_on_by_what_was_abnormal_then_and_does_not_pass_on_to_what_came_later():
    records = Records()
    detection = Detection(records.table)
    for step in range(30):
        detection.judge(records.step(step, {LOSS: 1.0, OUT: 1.0, G: 1.0}))
    nan = float("nan")
    first = detection.judge(records.step(30, {LOSS: 1.0, OUT: nan, G: nan}))
    assert [(a.name, a.passed_on) for a in first] == [("fc.output.0", False), ("fc.weight", True)]
    then = detection.judge(records.step(31, {LOSS: nan, OUT: 1.0, G: nan}))
    assert [(a.name, a.step, a.passed_on) for a in then] == [("loss", 30, True), ("fc.weight", 31, False)]


def test_one_that_is_logged_in_its_own_step_stays_there():
    records = Records()
    detection = Detection(records.table)
    for step in range(30):
        detection.judge(records.step(step, {OUT: 1.0, LOSS: 1.0, G: 1.0}))
    [bad] = detection.judge(records.step(30, {LOSS: float("nan"), G: 1.0}))
    assert bad.step == 30, "steps without activations tell nothing about it"


def test_what_a_skipped_step_made_is_excused_a_step_later_too_and_nothing_else():
    records = Records()
    detection = Detection(records.table)
    norm, nan = ("grad_norm", "grad_norm"), float("inf")
    for step in range(30):
        detection.judge(records.step(step, {norm: 1.0, OUT: 1.0, G: 1.0}))
    assert detection.judge(records.step(30, {norm: 1.0, OUT: 1.0, G: nan}, skipped=True)) == []
    assert detection.judge(records.step(31, {norm: nan, OUT: 1.0, G: 1.0})) == [], "it is that of the skipped step"
    [bad] = detection.judge(records.step(32, {norm: nan, OUT: 1.0, G: nan}, skipped=True))
    assert (bad.name, bad.step) == ("grad_norm", 31)


@pytest.mark.parametrize("to", [0, 12])
def test_after_a_rollback_nothing_belongs_to_a_step_before(to):
    records = Records()
    detection = Detection(records.table)
    for step in range(30):
        detection.judge(records.step(step, {LOSS: 1.0, OUT: 1.0, G: 1.0}))
    [bad] = detection.judge(records.step(to, {LOSS: float("nan"), OUT: 1.0, G: 1.0}))
    assert bad.step == to


def test_a_second_part_of_a_step_that_begins_with_the_loss_does_not_make_it_late():
    records = Records()
    detection = Detection(records.table)
    for step in range(30):
        detection.judge(records.step(step, {OUT: 1.0, G: 1.0}))
        detection.judge(records.step(step, {LOSS: 1.0, ("b.output.0", "activation_output"): 1.0}, first_order=2))
    detection.judge(records.step(30, {OUT: 1.0, G: 1.0}))
    [bad] = detection.judge(records.step(30, {LOSS: float("nan")}, first_order=2))
    assert bad.step == 30


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("collect", [{}, {"activations": {"every": 1}}])
def test_in_a_run_a_loss_out_of_bounds_is_the_first_suspect_wherever_it_is_logged(tmp_path, late, collect, caplog):
    caplog.set_level(logging.CRITICAL, "trainsentry")
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    config = {"output_dir": str(tmp_path), "collect": collect, "on_incident": {"dump": False}}
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        for step in range(60):
            loss = (model(torch.randn(64, 8)) - 1).square().mean() * (1e4 if step == 53 else 1)
            loss.backward()
            for now in (False, True):
                if late == now:
                    monitor.log(loss=loss)
                if not now:
                    optimizer.step()
            optimizer.zero_grad()
        monitor.flush()
        incident = monitor.incidents[0]
    assert (incident.name, incident.first_seen) == ("loss", 53)
    again = diagnose([tmp_path / "rank0"], lambda *_: None, anew=True)[0]
    assert (again.name, again.first_seen) == ("loss", 53), "tables tell where it was logged by what they leave out"
