"""Copies of a watched model carry no part of the monitor."""

import copy
import subprocess
import sys

import torch
from tiny_models import EVERY_STEP, Gpt, mlp, train
from torch.optim.swa_utils import AveragedModel

import trainsentry


def test_a_deep_copy_leaves_no_row_and_works(out):
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters())
    config = {"output_dir": str(out), "strict": True, "collect": EVERY_STEP}
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        train(model, optimizer, 1, monitor)
        twin = copy.deepcopy(model)  # hooks for the next step are attached by now
        average = AveragedModel(model)
        copy.deepcopy(optimizer)
        before = len(monitor._loop.watch.rows)
        twin(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
        average(torch.zeros(1, 4, dtype=torch.long))
        assert len(monitor._loop.watch.rows) == before
        train(model, optimizer, 1, monitor)
        average.update_parameters(model)
    from trainsentry.collectors.guard import InertWhenCopied

    for module in twin.modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        assert not any(isinstance(hook, InertWhenCopied) for hook in hooks)


def test_a_watched_model_saves_and_loads_where_trainsentry_is_not_installed(out, tmp_path):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    config = {"output_dir": str(out), "strict": True, "collect": EVERY_STEP}
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        train(model, optimizer, 1, monitor)
        torch.save(model, tmp_path / "model.pt")
        torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    code = f"""
import sys
sys.modules["trainsentry"] = None
import torch
model = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
model(torch.ones(1, 8)).sum().backward()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
