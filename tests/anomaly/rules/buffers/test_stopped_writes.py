"""An average and a code book that are kept up to date no more are told; what is switched off or put aside is not."""

import copy
import warnings

import pytest
import torch
import torch.ao.quantization as quantization
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, one_hot

import trainsentry

STEPS, AT = 440, 200


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch):
    """Other tests of this process compile."""
    monkeypatch.setattr("trainsentry.collectors.torch.parameters.stopped_writes.has_compiled", lambda: False)


class Distilled(nn.Module):
    """A student beside an average of itself, as in self-distillation."""

    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.teacher = copy.deepcopy(self.student).requires_grad_(requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            target = self.teacher(x + 0.1 * torch.randn_like(x)) if self.training else None
        return self.student(x), target

    @torch.no_grad()
    def follow(self):
        for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            slow.lerp_(fast, 0.05)


class CodeBook(nn.Module):
    """Vectors that follow what they stand for, as in a VQ-VAE with averages."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(8, 4)
        self.register_buffer("codes", torch.randn(6, 4))
        self.register_buffer("counts", torch.ones(6))
        self.follows = True

    def forward(self, x):
        encoded = self.encoder(x)
        nearest = torch.cdist(encoded, self.codes).argmin(1)
        if self.follows:
            with torch.no_grad():
                members = one_hot(nearest, 6).float()
                self.counts.lerp_(members.sum(0), 0.05)
                self.codes.lerp_(members.T @ encoded / self.counts.clamp(min=1.0)[:, None], 0.05)
        return encoded + (self.codes[nearest] - encoded).detach(), encoded


def train(model, tmp_path, loss_of, after=lambda step: None, before=lambda step: None):
    """Return the first suspect of each incident of a training, with its last healthy step and its step."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    config = {"output_dir": str(tmp_path), "collect": {"activations": {"every": 5}}}
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        for step in range(STEPS):
            before(step)
            loss = loss_of(model, torch.randn(16, 8))
            optimizer.zero_grad()
            loss.backward()
            monitor.log(loss=loss.detach())
            optimizer.step()
            after(step)
    return [(i.name, i.quantity, i.step) for i in monitor.incidents], [i.summary for i in monitor.incidents]


def distil(model, x):
    answer, target = model(x)
    return mse_loss(answer, target + 0.1 * x[:, :4])


def encode(model, x):
    coded, encoded = model(x)
    return mse_loss(coded, x[:, :4]) + 0.1 * encoded.square().mean()


@pytest.mark.parametrize("lost", [True, False])
def test_an_average_of_weights_that_nobody_keeps_up_to_date(tmp_path, lost):
    torch.manual_seed(0)
    model = Distilled()
    told, [*said] = train(model, tmp_path, distil, after=lambda step: None if lost and step >= AT else model.follow())
    if not lost:
        assert told == []
        return
    [(name, quantity, step)] = told
    assert name.startswith("teacher.")
    assert quantity == "parameter"
    assert AT <= step <= AT + 9
    assert f"and step {step} on rank 0: parameter {name} is not updated any more since" in said[0]


@pytest.mark.parametrize("lost", [True, False])
def test_a_copy_for_evaluations_is_kept_up_to_date_though_nothing_calls_it(tmp_path, lost):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    average = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda old, new, _: 0.9 * old + 0.1 * new)
    average.eval().requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {"output_dir": str(tmp_path), "collect": {"activations": {"every": 5}}}
    with trainsentry.TrainMonitor(config).watch([model, average], optimizer) as monitor:
        for step in range(STEPS):
            x = torch.randn(16, 8)
            loss = mse_loss(model(x), x[:, :4])
            optimizer.zero_grad()
            loss.backward()
            monitor.log(loss=loss.detach())
            optimizer.step()
            if step < AT or not lost:
                average.update_parameters(model)
    told = [(i.quantity, AT <= i.step <= AT + 9) for i in monitor.incidents]
    assert told == ([("parameter", True)] if lost else [])


def test_a_code_book_that_is_not_updated_any_more(tmp_path):
    torch.manual_seed(0)
    model = CodeBook()
    told, _ = train(model, tmp_path, encode, before=lambda step: setattr(model, "follows", step < AT))
    assert told[0][:2] in {("codes", "buffer"), ("counts", "buffer")}
    assert AT <= told[0][2] <= AT + 9


def test_a_teacher_that_is_asked_no_more_rests_by_right(tmp_path):
    torch.manual_seed(0)
    model = Distilled()

    def alone(model, x):
        if model.teacher is not None and step_of[0] < AT:
            return distil(model, x)
        return mse_loss(model.student(x), 0.1 * x[:, :4])

    step_of = [0]
    told, _ = train(
        model,
        tmp_path,
        alone,
        before=lambda step: step_of.__setitem__(0, step),
        after=lambda step: model.follow() if step < AT else None,
    )
    assert [t for t in told if t[1] == "parameter"] == []


def test_observers_of_quantized_training_and_frozen_norms_are_switched_off_by_design(tmp_path):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(quantization.QuantStub(), *layers, quantization.DeQuantStub()).train()
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        quantization.prepare_qat(model, inplace=True)

    def freeze(step):
        if step == AT:
            model.apply(quantization.disable_observer)
        if step == AT + 5:
            model[2].eval()

    told, _ = train(model, tmp_path, lambda m, x: cross_entropy(m(x), x[:, :4].argmax(1)), before=freeze)
    assert [t for t in told if t[1] == "buffer"] == []
