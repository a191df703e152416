"""Small watched runs, and readers of the files they write."""

import json
import logging

import pandas as pd
import torch
from tiny_models import EVERY_STEP, mlp, train

import trainsentry
from trainsentry.monitor.recorder import link

STEPS = 12


def make(out, **config):
    """Return a model, its optimizer, and the monitor that watches both; every quantity is sampled at every step."""
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = {"output_dir": str(out), "collect": EVERY_STEP, **config}
    return model, optimizer, trainsentry.TrainMonitor(settings).watch(model, optimizer)


def bare():
    """Return the losses of the same run without a monitor."""
    torch.manual_seed(0)
    model = mlp()
    return train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), STEPS).losses


def plant(*_, **__):
    """Fail, in the place of a part of the monitor."""
    raise OSError("planted")


def status(out):
    """Return the status that rank 0 has written."""
    return json.loads((out / "rank0" / "status.json").read_text())


def gaps(out):
    """Return the gaps as (sink, first step, last step)."""
    return [(gap["sink"], gap["first_step"], gap["last_step"]) for gap in status(out)["gaps"]]


def errors(caplog):
    """Return the errors that were logged."""
    return [r for r in caplog.records if r.levelno >= logging.ERROR]


def rows(out, table="gradient", name="_0-999.csv"):
    """Return how many rows each step has in a table."""
    steps = pd.read_csv(out / "rank0" / f"{table}{name}")["step"]
    return {int(step): int(count) for step, count in steps.value_counts().items()}


def removing_table(out, monitor, at):
    """Return a `before_step` that removes the table of gradients at a step, once all before it is written."""

    def before_step(step):
        if step == at:
            monitor.flush()
            (out / "rank0" / "gradient_0-999.csv").unlink()

    return before_step


def start_with(monkeypatch, starter):
    """Have recorders started by `starter(settings, ring, channel)`."""
    original = link.RecorderLink.__init__
    monkeypatch.setattr(
        "trainsentry.monitor.recorder.link.RecorderLink.__init__",
        lambda self, settings, table: original(self, settings, table, starter),
    )
