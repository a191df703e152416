"""An incident sets off dense sampling, overflow counting, an overflow check and a stop."""

import json
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from broken_weight import FLIP, break_weight, make
from tiny_models import train
from written_files import json_lines

from trainsentry import OverflowLimitReached, TrainingStopped
from trainsentry.anomaly.incident import Incident
from trainsentry.collectors.guard import Guard
from trainsentry.monitor.config.schema import MonitorConfig
from trainsentry.monitor.ranks.consensus import Consensus
from trainsentry.monitor.schedule import Schedule
from trainsentry.monitor.trainer.triggers import Triggers


def test_an_incident_switches_to_dense_sampling_for_n_steps(out):
    model, optimizer, monitor = make(out, on_incident={"sample_every_step_for": 4, "dump": False})
    with monitor:
        train(model, optimizer, 30, monitor, before_step=break_weight(model, value=1e30))
    steps = set(pd.read_csv(out / "rank0" / "update_0-999.csv")["step"])
    assert steps == {0, 10, 14, 15, 16, 17, 20}
    # The step itself was examined out of turn.
    assert FLIP in set(pd.read_csv(out / "rank0" / "parameter_0-999.csv")["step"])


@pytest.mark.parametrize("same_step", [True, False])
def test_overflow_nums_stops_at_the_nth_step_with_an_overflow(out, same_step):
    config = {"overflow_check": {"overflow_nums": 3}, "on_incident": {"dump": {"same_step": same_step}}}
    model, optimizer, monitor = make(out, **config)
    weights = {}
    optimizer.register_step_pre_hook(lambda *_: weights.update(before=model[0].bias.detach().clone()))
    with monitor, pytest.raises(OverflowLimitReached) as stopped:
        train(model, optimizer, 40, monitor, before_step=break_weight(model))
    assert stopped.value.step == FLIP + 2
    assert torch.equal(model[0].bias, weights["before"]) == same_step or model[0].bias.isnan().any()
    assert isinstance(stopped.value, TrainingStopped)
    lines = json_lines(out / "rank0" / "overflow.jsonl")
    assert [(line["step"], line["count"]) for line in lines] == [(FLIP, 1), (FLIP + 1, 2), (FLIP + 2, 3)]
    assert ["gradient", "2.weight", 0] in lines[0]["names"]


def test_minus_one_counts_to_the_end(out):
    model, optimizer, monitor = make(out)
    with monitor:
        train(model, optimizer, FLIP + 5, monitor, before_step=break_weight(model))
    assert json.loads((out / "rank0" / "status.json").read_text())["overflow_steps"] == 5


def test_overflow_check_off_is_started_by_an_incident_or_stays_off(out, tmp_path):
    for name, on_incident in (("started", True), ("off", False)):
        config = {"overflow_check": False, "on_incident": {"overflow_check": on_incident, "dump": False}}
        model, optimizer, monitor = make(out / name, **config)
        with monitor:
            train(model, optimizer, FLIP + 3, monitor, before_step=break_weight(model))
        assert (out / name / "rank0" / "overflow.jsonl").exists() == on_incident


def test_an_incident_stops_before_the_update_when_asked_to(out):
    model, optimizer, monitor = make(out, on_incident={"stop": True})
    with monitor:
        with pytest.raises(TrainingStopped) as stopped:
            train(model, optimizer, 40, monitor, before_step=break_weight(model))
        assert stopped.value.step == FLIP
        assert stopped.value.incident.name == "2.weight"
        assert model[0].weight.isfinite().all()  # the update that would have spread it did not happen
    assert (out / "dump" / f"step{FLIP}" / "rank0" / "dump.json").exists()


def test_a_suspicion_is_looked_into_at_the_next_step_and_costs_no_more_than_usual_sampling(out):
    model, optimizer, monitor = make(out, collect={"activations": False})
    sampled = []
    with monitor:
        for step in range(40):
            train(model, optimizer, 1, seed=step)
            monitor.log(loss=2.0 if step == 31 else 1.0)  # twice the usual, once: too little for an incident
            monitor.flush()
        assert monitor.incidents == ()
        table = monitor.records()
        sampled = sorted(set(table[table["quantity"] == "parameter"]["step"]))
    assert sampled[:4] == [0, 10, 20, 30]
    assert len(sampled) == 5
    assert sampled[4] in {33, 34}


def test_an_incident_of_nan_starts_an_overflow_check_of_the_next_step(out):
    model, optimizer, monitor = make(out)
    with monitor:
        train(model, optimizer, FLIP + 3, monitor, before_step=break_weight(model))
        monitor.flush()
        actions = [a for i in monitor.incidents for a in i.actions]
    [action] = [a for a in actions if a.startswith("overflow check")]
    broken = "the step began with NaN or Inf in 0.weight and 3 more"  # which the update has spread
    assert action.startswith(f"overflow check: {broken}; overflow/step{FLIP + 1}/rank0 (")
    directory = out / "overflow" / f"step{FLIP + 1}" / "rank0"
    data = json.loads((directory / "dump.json").read_text())["data"]
    first = next(iter(data))
    assert data[first]["overflow"] in {"made", "passed_on"}
    assert first in action
    assert not (directory / "dump_tensor_data").exists()


def test_without_overflow_check_there_is_none(out):
    model, optimizer, monitor = make(out, on_incident={"overflow_check": False})
    with monitor:
        train(model, optimizer, FLIP + 3, monitor, before_step=break_weight(model))
    assert not (out / "overflow").exists()


def test_incidents_of_a_recorder_that_took_over_are_acted_on_although_it_counts_from_one_again():
    guard, seen = Guard(), []
    consensus = Consensus.of_single_rank(Schedule(MonitorConfig()), guard)
    triggers = Triggers(None, consensus, SimpleNamespace(send=lambda *_, **__: True), guard)
    triggers.callbacks.append(lambda incident: seen.append(incident.id))
    for incident_id, settled in ((1, 0), (1, 1), (2, 2), (3, 1), (3, 1)):
        suspect = (incident_id, 5, 0, "w", "gradient", "nans", "nonfinite", "critical", 9.0, "w is NaN", (), (), 5, 5)
        message = {"type": "incident", "incident": Incident(*suspect).to_json(), "settled": settled}
        triggers.receive([message])
        triggers.act_on(consensus.at_boundary(5, triggers.proposal(6)), 6)
    assert seen == [1, 2, 3]


@pytest.mark.parametrize("at", [213, 220])
def test_a_value_far_beyond_its_past_stops_before_the_update_of_its_own_step(out, at, caplog):
    """Steps of a millisecond: without waiting, the recorder would be some steps behind.

    The wait is bounded: where other tests leave the recorder no processor for seconds, it says so, and is tried again.
    """
    for attempt in range(3):
        caplog.clear()
        stopped = None
        model, optimizer, monitor = make(out / str(attempt), on_incident={"stop": True, "dump": False})
        with monitor:
            try:
                train(model, optimizer, at + 200, monitor, before_step=break_weight(model, value=1e5, at=at))
            except TrainingStopped as error:
                stopped = error
        if "behind the training" not in caplog.text:
            break
    assert stopped is not None
    assert (stopped.step, stopped.incident.name) == (at, "2.weight")
