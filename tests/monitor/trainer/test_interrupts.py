"""Ctrl-C inside the monitor, caught by a notebook, leaves a consistent record and no false alarm."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter

import pandas as pd
import pytest
import torch
from forked_scripts import Script, start_forked
from tiny_models import EVERY_STEP
from torch import nn

import trainsentry

STEPS = 12


class Interrupting:
    """Raises KeyboardInterrupt as the n-th function of the package is entered in one step of the loop."""

    def __init__(self, nth):
        self.left = nth
        self.raised = False

    def __call__(self, frame, event, _):
        if event == "call" and "trainsentry" in frame.f_globals.get("__name__", "") and not self.raised:
            self.left -= 1
            if self.left == 0:
                self.raised = True
                raise KeyboardInterrupt


def train(out, interruptions):
    """Train; `interruptions` maps a step to the function call of the monitor that a Ctrl-C comes in."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {"output_dir": str(out), "collect": EVERY_STEP}
    generator = torch.Generator().manual_seed(1)
    hit = 0
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        for step in range(STEPS):
            interrupting = Interrupting(interruptions.get(step, -1))
            model(torch.randn(4, 4, generator=generator)).square().mean().backward()
            sys.setprofile(interrupting)
            try:
                optimizer.step()
            except KeyboardInterrupt:
                hit += 1
            finally:
                sys.setprofile(None)
            optimizer.zero_grad()
        monitor.flush()
        failures = dict(monitor._guard.failures)
        records, incidents = monitor.records(), monitor.incidents
    return records, incidents, failures, hit


def counted(records, step):
    """Rows by quantity; a step whose optimizer was cut off before it began has two forward passes, and both count.

    Modules take turns at being looked at, and what an interrupted step left in gradients is written once more.
    """
    differing = ("activation", "recomputed", "euler_gap", "gradient_writes")
    of_step = records[(records.step == step) & ~records.quantity.str.startswith(differing)]
    return Counter(of_step.quantity)


@pytest.mark.parametrize("start", range(0, 400, 50))
def test_an_interrupted_step_is_left_out_and_the_others_are_whole(tmp_path, start):
    whole = train(tmp_path / "whole", {})[0]
    rows = counted(whole, 6)
    records, incidents, failures, hit = train(tmp_path / "cut", {3: start + 1, 5: start + 20, 8: start + 37})
    assert hit == 3
    assert incidents == ()
    assert not failures
    keys = Counter(zip(records.step, records.quantity, records.name, records.micro_step, strict=True))
    assert set(keys.values()) == {1}
    for step in set(records.step) - {0}:
        assert counted(records, step) == rows, step


def test_what_is_left_out_is_a_gap(tmp_path):
    reasons = []
    for place in (20, 30, 45, 60, 90):  # not every place leaves something out
        out = tmp_path / str(place)
        records, *_ = train(out, {4: place})
        status = json.loads((out / "rank0" / "status.json").read_text())
        missing = set(range(STEPS)) - set(records.step)
        told = {step for gap in status["gaps"] for step in range(gap["first_step"], gap["last_step"] + 1)}
        assert missing <= told | {STEPS - 1}  # one step of the optimizer fewer was seen
        reasons += [gap["reason"] for gap in status["gaps"]]
    assert any("KeyboardInterrupt" in reason for reason in reasons)


LOOP = """
import signal, sys, torch, trainsentry, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # what starts the tests in the background may ignore it
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with trainsentry.TrainMonitor({"output_dir": sys.argv[1]}).watch(model, optimizer):
    for step in range(100000):
        optimizer.zero_grad(); model(torch.ones(2, 4)).sum().backward(); optimizer.step()
        print(step, flush=True)
        time.sleep(0.01)
"""


def test_ctrl_c_ends_training_and_loses_nothing(out):
    process = start_forked(Script(LOOP, [out]))
    for line in process.stdout:
        if int(line) >= 20:
            break
    recorder = int(subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()[0])
    os.kill(recorder, signal.SIGINT)  # as a terminal would send it to both
    process.send_signal(signal.SIGINT)
    output, log = process.communicate(timeout=60)
    last = max([20, *(int(line) for line in output.split())])
    assert "died" not in log
    table = pd.read_csv(out / "rank0" / "gradient_0-999.csv")
    assert sorted(set(table["step"])) == list(range(last + 1)) or sorted(set(table["step"])) == list(range(last + 2))
