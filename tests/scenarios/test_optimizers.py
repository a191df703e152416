"""Optimizers do what they say: what they keep and what they do follows from gradients, weights and options."""

import itertools
import json
import math
import sys

import pytest
import torch
from torch import nn
from two_families import CONFIGURATIONS, FAMILIES, FAULT, OPTIMIZERS, train

import trainsentry
from trainsentry.collectors.torch.parameters import weight_writes

both_families = pytest.mark.parametrize("family", FAMILIES)
both_configurations = pytest.mark.parametrize("collect", CONFIGURATIONS)

FOLLOWED = {
    "climbs": ("exp_avg", "exp_avg_sq"),
    "amsgrad": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "adam with decay": ("exp_avg",),
    "nadam": ("exp_avg", "exp_avg_sq"),
    "dampened": ("momentum_buffer",),
    "adamax": ("exp_avg", "exp_inf"),
    "rmsprop": ("square_avg",),
    "centred": ("square_avg", "grad_avg"),
    "adagrad": ("sum",),
    "adadelta": ("square_avg",),
    "asgd": ("ax",),
    "adafactor": ("row_var", "col_var"),
    "two groups": ("exp_avg", "exp_avg_sq"),
}
"""The states of each optimizer that must follow from gradients, weights and their own past."""


@both_families
@pytest.mark.parametrize("optimizer", [*list(OPTIMIZERS)[:8], "fused"])
def test_optimizers_that_do_what_they_say_are_quiet(tmp_path, family, optimizer):
    everything = "everything" if optimizer in {"adamw", "nesterov", "climbs"} else "default"
    clip = 0.5 if optimizer in {"adamw", "nadam"} else None
    assert train(tmp_path, family, optimizer, everything, clip=clip) == []


@both_families
@pytest.mark.parametrize("optimizer", ["adamw", "fused"])
def test_a_weight_that_is_frozen_between_samples_is_named_at_its_own_step(tmp_path, family, optimizer, monkeypatch):
    """torch does not count what a fused optimizer writes to a weight; Hugging Face's trainer uses one by default."""
    monkeypatch.setattr(weight_writes, "has_compiled", lambda: False)  # other tests of this process compile
    name = FAMILIES[family][3]

    def freeze(model, stepper, step):
        if step >= FAULT:
            model.get_parameter(name).requires_grad_(False).grad = None

    [found, *_] = train(tmp_path, family, optimizer, harm=freeze, steps=FAULT + 5)
    assert (found.name, found.step, found.kind) == (name, FAULT, "frozen")


@both_families
@both_configurations
@pytest.mark.parametrize("optimizer", ["adamw", "nesterov"])
def test_state_that_does_not_follow_from_its_past_is_named(tmp_path, family, collect, optimizer):
    name = FAMILIES[family][2]
    key = "exp_avg" if optimizer == "adamw" else "momentum_buffer"

    def shift(model, stepper, step):
        if step == FAULT:
            moment = stepper.state[model.get_parameter(name)][key]
            moment.add_(0.2 * moment.square().mean().sqrt())

    [found, *_] = train(tmp_path, family, optimizer, collect, shift)
    assert (found.name, found.quantity) == (name, key)
    assert FAULT <= found.step <= FAULT + 10


@both_families
@pytest.mark.parametrize("fault", [None, FAULT])
def test_state_is_followed_where_the_gradient_after_each_micro_step_is_read(tmp_path, family, fault):
    """The optimizer uses the last of a step's gradients, after clipping."""
    name = FAMILIES[family][2]

    def shift(model, stepper, step):
        if step == fault:
            moment = stepper.state[model.get_parameter(name)]["exp_avg_sq"]
            moment.view(-1)[3] += 0.1 * moment.sum()

    found = train(tmp_path, family, "adamw", "everything", shift, steps=FAULT + 10, clip=0.5, micro_steps=3)
    assert [(i.name, i.quantity, i.step) for i in found] == ([(name, "exp_avg_sq", fault)] if fault else [])


@both_families
@pytest.mark.parametrize("optimizer", FOLLOWED)
def test_each_state_of_each_optimizer_is_followed(tmp_path, family, optimizer):
    """Each is clipped, too: what the optimizer is given counts."""
    fault, changed = 45, []

    def shift(model, stepper, step):
        if step == fault:
            matrices = [(name, p) for name, p in model.named_parameters() if p.dim() > 1]
            for (name, p), key in zip(matrices, FOLLOWED[optimizer], strict=False):
                state = stepper.state[p][key]
                state.add_(0.3 * state.square().mean().sqrt() if key != "ax" else state.abs().max())
                changed.append((name, key))

    train(tmp_path, family, optimizer, "everything", shift, steps=60, clip=0.5)
    lines = [json.loads(line) for line in (tmp_path / "rank0" / "anomalies.jsonl").read_text().splitlines()]
    alarms = [each for each in lines if each["alarm"]]
    assert min(each["step"] for each in alarms) == fault, "healthy steps are quiet"
    found = {(each["name"], each["quantity"]) for each in alarms if each["step"] == fault}
    assert changed
    assert found >= set(changed)


@both_families
@both_configurations
def test_a_moment_that_is_a_copy_is_named(tmp_path, family, collect):
    name, kept = FAMILIES[family][2], {}

    def stale(model, stepper, step):
        if step >= FAULT:
            moment = stepper.state[model.get_parameter(name)]["exp_avg"]
            moment.copy_(kept.setdefault("moment", moment.clone()))

    [found, *_] = train(tmp_path, family, collect=collect, harm=stale)
    assert (found.name, found.quantity) == (name, "exp_avg")


@both_families
@pytest.mark.parametrize("optimizer", ["adamw", "dampened"])
def test_a_moment_of_another_step_is_named_where_its_mean_is_right(tmp_path, family, optimizer):
    name = FAMILIES[family][2]
    key = "exp_avg" if optimizer == "adamw" else "momentum_buffer"

    def grow(model, stepper, step):
        if step == FAULT:
            moment = stepper.state[model.get_parameter(name)][key]
            moment.add_(0.05 * (moment - moment.mean()))

    [found, *_] = train(tmp_path, family, optimizer, "everything", grow)
    assert (found.name, found.quantity, found.step) == (name, key, FAULT)
    assert "the angle between them" in found.summary


@both_families
@both_configurations
def test_an_update_that_the_optimizer_does_not_say_is_named(tmp_path, family, collect, monkeypatch):
    name, step_of = FAMILIES[family][3], 10 * math.ceil(FAULT / 10)
    module = sys.modules[torch.optim.SGD.__module__]
    right, updates, weights = module.sgd, itertools.count(), []

    def wrong(params, *args, **kwargs):
        before = params[weights[0]].detach().clone()
        right(params, *args, **kwargs)
        if next(updates) == step_of:
            params[weights[0]].lerp_(before, 0.5)

    def note(model, stepper, step):
        weights[:] = [[n for n, _ in model.named_parameters()].index(name)]

    monkeypatch.setattr(module, "sgd", wrong)
    [found, *_] = train(tmp_path, family, "nesterov", collect, note)
    assert (found.name, found.quantity, found.step) == (name, "update", step_of)


@both_families
@both_configurations
@pytest.mark.parametrize("optimizer", ["adamw", "nesterov"])
def test_a_weight_that_no_update_can_have_moved_so_far_is_named(tmp_path, family, collect, optimizer):
    name = FAMILIES[family][2]

    def noise(model, stepper, step):
        if step == FAULT:
            weight = model.get_parameter(name)
            with torch.no_grad():
                weight.add_(torch.randn_like(weight) * weight.std() * 2)

    [found, *_] = train(tmp_path, family, optimizer, collect, noise)
    assert (found.name, found.quantity) == (name, "parameter")


@both_families
@both_configurations
def test_an_option_that_changes_is_named_at_its_own_step(tmp_path, family, collect):
    def change(model, stepper, step):
        if step == FAULT:
            stepper.param_groups[0]["betas"] = (0.99, 0.999)

    [found, *_] = train(tmp_path, family, collect=collect, harm=change)
    assert (found.quantity, found.name, found.step) == ("optimizer", "betas.0 of group 0", FAULT)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_the_momentum_of_muon_is_followed(tmp_path):
    """It takes matrices alone, and weighs the gradient by what the momentum lacks of 1."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(12, 12, bias=False), nn.Tanh())))
    optimizer = torch.optim.Muon(model.parameters(), lr=5e-3)
    collect = {part: {"every": 1} for part in ("parameters", "optimizer_state")}
    config = {"output_dir": str(tmp_path), "strict": True, "on_incident": False, "collect": collect}
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        for step in range(45):
            x = torch.randn(8, 12)
            (model(x) - x).square().mean().backward()
            if step == 35:
                buffer = optimizer.state[model[4].weight]["momentum_buffer"]
                buffer.add_(0.3 * buffer.square().mean().sqrt())
            optimizer.step()
            optimizer.zero_grad()
        monitor.flush()
        found = monitor.incidents
    assert [(i.name, i.quantity, i.kind, i.step) for i in found][:1] == [
        ("4.weight", "momentum_buffer", "recurrence", 35)
    ]
