"""What only code changes in a forward pass (a dtype, a mask, an operation) is found in real trainings."""

import json
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from two_families import CONFIGURATIONS, FAMILIES, FAULT, train

import trainsentry
from trainsentry.collectors.series import LOOKED_AT_EVERY
from trainsentry.collectors.torch.parameters import buffer_writes, gradient_writes, weight_writes

STEPS = FAULT + 40


def changes_of_dtype(tmp_path):
    path = tmp_path / "rank0" / "anomalies.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [(line["quantity"], line["alarm"]) for line in lines if line["detector"] == "dtype_change"]


def begin_autocast(model, _stepper, step):
    """Take all forward passes from `FAULT` on in bfloat16."""
    if step == FAULT - 1:
        model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)


@pytest.mark.parametrize("collect", CONFIGURATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_precision_that_begins_alarms_nobody_and_explains_what_it_rounds(tmp_path, family, collect):
    """The gradients of biases ahead of a batch norm are nothing but rounding, which bfloat16 makes larger."""
    found = train(tmp_path, family, collect=collect, harm=begin_autocast, steps=STEPS)
    assert [i.kind for i in found] == ["dtype_change"] * (family == "resnet")
    told = changes_of_dtype(tmp_path)
    assert {alarm for quantity, alarm in told if quantity == "activation_output"} == {False}


@pytest.mark.parametrize("collect", CONFIGURATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_precision_that_begins_is_the_first_suspect_of_what_alarms_then(tmp_path, family, collect):
    def leaks(step, given):
        inputs, targets = given
        return (inputs, targets.flip(0)) if step >= FAULT else given

    [found, *_] = train(tmp_path, family, collect=collect, harm=begin_autocast, batch=leaks, steps=STEPS)
    assert found.kind == "dtype_change"
    assert "changes from float32 to bfloat16" in found.summary


class Attention(nn.Module):
    """Causal attention of one head; its weights are the dropout's input."""

    def __init__(self):
        super().__init__()
        self.embedding, self.qkv = nn.Embedding(32, 16), nn.Linear(16, 48)
        self.drop, self.head = nn.Dropout(0.0), nn.Linear(16, 32)
        self.masks = True

    def forward(self, tokens):
        q, k, v = self.qkv(self.embedding(tokens)).chunk(3, dim=-1)
        scores = q @ k.transpose(1, 2) / 4
        if self.masks:
            scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
        return self.head(self.drop(scores.softmax(-1)) @ v)


class Rectified(nn.Module):
    """Two convolutions with a rectifier in between, which is no module."""

    def __init__(self):
        super().__init__()
        self.first, self.drop, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 4)
        self.masks = True

    def forward(self, x):
        x = self.first(x)
        return self.head(self.drop(x.relu() if self.masks else x).mean((2, 3)))


@pytest.mark.parametrize("model", [Attention, Rectified])
@pytest.mark.parametrize("lost", [True, False])
def test_a_mask_that_is_lost_between_two_modules_is_named_by_default(tmp_path, model, lost):
    torch.manual_seed(0)
    watched, data = model(), FAMILIES["gpt" if model is Attention else "resnet"][1]
    optimizer, generator = torch.optim.AdamW(watched.parameters(), lr=1e-3), torch.Generator().manual_seed(1)
    monitor = trainsentry.TrainMonitor({"output_dir": str(tmp_path), "strict": True}).watch(watched, optimizer)
    for step in range(STEPS):
        watched.masks = not (lost and step >= FAULT)
        inputs, targets = data(generator)
        nn.functional.cross_entropy(watched(inputs).flatten(0, -2), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= FAULT:
            monitor.flush()  # on a busy machine, too, the steps after the first suspicion are sampled
    assert len(monitor.incidents) == lost
    for incident in monitor.incidents:
        said = [suspect.evidence for suspect in incident.suspects]
        assert f"it has other operations (without {'masked_fill' if model is Attention else 'relu'})" in said[0]
        assert "no element of activation drop.input.0 is zero from step 100 on" in said[1]
    monitor.close()


def test_a_running_variance_that_something_overwrites_is_named_with_its_step(tmp_path, monkeypatch):
    """A stale copy is put back before each update, as by a broadcast of buffers."""
    monkeypatch.setattr(buffer_writes, "has_compiled", lambda: False)  # other tests of this process compile
    kept = {}

    def put_back(model, stepper, step):
        stale = kept.setdefault("var", model.body[1].running_var.clone())
        if step >= FAULT:
            model.body[1].running_var.copy_(stale)

    [found] = train(tmp_path, "resnet", harm=put_back, steps=FAULT + 15)
    assert (found.name, found.quantity, found.step) == ("body.1.running_var", "buffer", FAULT)


def with_gelu(family):
    """Return how to make a model of a family whose activation functions are GELU."""

    plain = FAMILIES[family][0]

    def make():
        model = plain()
        if family == "gpt":
            for block in model.blocks:
                block.activation = functional.gelu
        else:
            model.body[2] = nn.GELU()
        return model

    return make


def approximate(model):
    """Approximate the GELU of a block, which changes its outputs by a thousandth."""
    if hasattr(model, "blocks"):
        model.blocks[0].activation = partial(functional.gelu, approximate="tanh")
    else:
        model.body[2].approximate = "tanh"


@pytest.mark.parametrize("collect", CONFIGURATIONS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("changes", [True, False])
def test_an_operation_that_is_computed_otherwise_is_named_where_no_statistic_moves(
    tmp_path, monkeypatch, family, collect, changes
):
    def harm(model, _stepper, step):
        if changes and step == FAULT - 1:
            approximate(model)

    monkeypatch.setitem(FAMILIES, family, (with_gelu(family), *FAMILIES[family][1:]))
    found = train(tmp_path, family, collect=collect, harm=harm, steps=STEPS)
    assert len(found) == changes
    if changes:
        assert found[0].name == ("blocks.0.output.0" if family == "gpt" else "body.2.output.0")
        assert found[0].step == (FAULT if collect == "everything" else FAULT // 10 * 10 + 10)
        assert "approximate of gelu is tanh, and was none" in found[0].summary


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_that_is_replaced_in_the_training_is_the_first_suspect(tmp_path, family, monkeypatch):
    monkeypatch.setattr(weight_writes, "has_compiled", lambda: False)  # other tests of this process compile

    def replace_head(model, _stepper, step):
        if step == FAULT - 1:
            model.head = nn.Linear(model.head.in_features, model.head.out_features)

    [found] = train(tmp_path, family, harm=replace_head, steps=STEPS)
    assert (found.step, found.name) == (FAULT, "head.weight")
    assert f"parameter head.weight of the model was replaced at step {FAULT}" in found.summary


@torch.no_grad()
def load_others(model):
    """Load what another training has learned."""
    model.load_state_dict({name: p.flip(0) if p.ndim > 1 else p for name, p in model.state_dict().items()})


@torch.no_grad()
def enlarge(model):
    model.head.weight.mul_(40)


@torch.no_grad()
def negate_gradient(model):
    model.head.weight.grad.neg_()


@torch.no_grad()
def pull_to_the_past(model):
    """Pull a weight towards what it was, as an average that is written into the wrong model."""
    model.head.weight.lerp_(model.head.weight.clone(), 0.1)


AGAIN = {
    negate_gradient: ("gradient", "something writes to the gradient of head.weight one time more often"),
    pull_to_the_past: ("parameter", "something other than its optimizer writes to parameter head.weight"),
}


@pytest.mark.parametrize("collect", CONFIGURATIONS)
@pytest.mark.parametrize("write", AGAIN)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_something_writes_to_before_each_update_is_the_first_suspect(
    tmp_path, family, write, collect, monkeypatch
):
    for counts in (weight_writes, gradient_writes):
        monkeypatch.setattr(counts, "has_compiled", lambda: False)  # other tests of this process compile
    quantity, says = AGAIN[write]
    harm = lambda model, _, step: write(model) if step >= FAULT else None  # noqa: E731
    [found, *_] = train(tmp_path, family, collect=collect, harm=harm, steps=STEPS)
    assert (found.name, found.quantity) == ("head.weight", quantity)
    assert found.step in range(FAULT, FAULT + (LOOKED_AT_EVERY if quantity == "gradient" else 1))
    assert says in found.summary


WRITTEN = {load_others: ("all", "most parameters were modified"), enlarge: ("head.weight", "was written")}


@pytest.mark.parametrize("write", WRITTEN)
@pytest.mark.parametrize("family", FAMILIES)
def test_by_default_what_code_writes_to_weights_is_the_first_suspect_between_their_samples(
    tmp_path, family, write, monkeypatch
):
    monkeypatch.setattr(weight_writes, "has_compiled", lambda: False)  # other tests of this process compile
    name, says = WRITTEN[write]
    [found] = train(tmp_path, family, harm=lambda m, _, step: write(m) if step == FAULT else None, steps=STEPS)
    assert (found.step, found.name) == (FAULT, name)
    assert f"{says} outside the optimizer update before step {FAULT}" in found.summary
