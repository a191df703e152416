"""The files say how a run ended: finished, stopped or crashed; also after the process is gone."""

import json

import pytest
import torch
from forked_scripts import Script, run_forked
from tiny_models import mlp, train

import trainsentry
from trainsentry.exporters.run_reader import read_run
from trainsentry.exporters.run_state import state_of_run

SCRIPT = """
import os, sys, torch, trainsentry
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
monitor = trainsentry.TrainMonitor({"output_dir": sys.argv[1]})
monitor.watch(model, optimizer)
for step in range(3):
    optimizer.zero_grad(); model(torch.ones(2, 4)).sum().backward(); optimizer.step()
"""


def watched(out):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return trainsentry.TrainMonitor({"output_dir": str(out)}).watch(model, optimizer), model, optimizer


def status(out):
    return json.loads((out / "rank0" / "status.json").read_text())


def close_within_finally(out, error):
    monitor, model, optimizer = watched(out)
    try:
        train(model, optimizer, 3, monitor)
        if error is not None:
            raise error
    finally:
        monitor.close()


@pytest.mark.parametrize(
    ("error", "ended"),
    [
        (None, "finished"),
        (ValueError("bad batch"), "crashed"),
        (KeyboardInterrupt(), "stopped"),
        (SystemExit(0), "finished"),
    ],
)
def test_the_exception_that_leaves_the_training_decides_how_it_ended(out, error, ended):
    if error is None:
        close_within_finally(out, None)
    else:
        with pytest.raises(type(error)):
            close_within_finally(out, error)
    assert (status(out)["state"], status(out)["ended"]) == ("closed", ended)
    assert state_of_run(read_run(out)) == ended
    assert status(out).get("why") == {"crashed": "ValueError: bad batch", "stopped": "KeyboardInterrupt"}.get(ended)


def test_a_stop_is_a_stop_also_where_the_script_handles_it(out):
    monitor, model, optimizer = watched(out)
    monitor.request_stop("enough")
    with pytest.raises(trainsentry.TrainingStopped):
        train(model, optimizer, 9, monitor)
    monitor.close()
    assert (status(out)["ended"], status(out)["why"]) == ("stopped", "enough")


def test_a_run_that_goes_on_after_a_stop_has_finished(out):
    monitor, model, optimizer = watched(out)
    monitor.request_stop("enough")
    with pytest.raises(trainsentry.TrainingStopped):
        train(model, optimizer, 9, monitor)
    train(model, optimizer, 4, monitor)
    monitor.close()
    assert (status(out)["ended"], "why" in status(out)) == ("finished", False)


def test_a_script_that_ends_by_itself_says_how(tmp_path):
    endings = {"raises": "raise ValueError('mine')", "exits": "os._exit(0)"}
    scripts = {name: Script(SCRIPT + ending, [tmp_path / name]) for name, ending in endings.items()}
    codes = {name: done.returncode for name, done in run_forked(scripts).items()}
    assert codes == {"raises": 1, "exits": 0}
    assert [state_of_run(read_run(tmp_path / name)) for name in endings] == ["crashed", "crashed"]
