"""A watched model whose weight breaks at a step, and the dump that this sets off."""

import json

import torch
from tiny_models import mlp

import trainsentry
from trainsentry.collectors.torch.saving import load_tensor

FLIP = 13  # a step at which weights are not sampled by default


def make(out, **config):
    """Return a model, its optimizer, and the strict monitor that watches both with default sampling."""
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    settings = {"output_dir": str(out), "strict": True, **config}
    return model, optimizer, trainsentry.TrainMonitor(settings).watch(model, optimizer)


def break_weight(model, value=float("nan"), at=FLIP):
    """Return a `before_step` that sets one element of the weight `2.weight` at a step."""

    def before_step(step):
        if step == at:
            with torch.no_grad():
                model[2].weight[1, 2] = value

    return before_step


def dump_of(out, step):
    """Return the description of a dump, and its tensors by file name."""
    directory = out / "dump" / f"step{step}" / "rank0"
    data = json.loads((directory / "dump.json").read_text())
    return data, {path.name: load_tensor(path) for path in (directory / "dump_tensor_data").iterdir()}
