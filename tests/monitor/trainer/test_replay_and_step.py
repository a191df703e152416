"""A replay is compared with what the step itself computed, and says which of them is wrong."""

import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from replayed import AT, EQUAL, FAULT, STEPS, Dense, corrupt_once, forget_graphs, made, rows, train
from tiny_models import Gpt
from torch import nn

import trainsentry


@pytest.fixture(autouse=True)
def _without_graphs():
    forget_graphs()


class ConvNet(nn.Module):
    """Convolutions with batch norm."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.second, self.last = nn.Conv2d(8, 8, 3), nn.Linear(8, 4)

    def forward(self, x):
        return self.last(self.second(F.relu(self.norm(self.first(x)))).mean((2, 3)))


class WithLoss(nn.Module):
    """Returns its loss and logits inside an object."""

    def __init__(self, made_by):
        super().__init__()
        self.net, self.made_by = Dense(), made_by

    def forward(self, x):
        logits = self.net(x)
        return self.made_by(loss=logits.square().mean(), logits=logits)


def tokens(generator):
    return torch.randint(0, 64, (2, 16), generator=generator)


def images(generator):
    return torch.randn(4, 3, 8, 8, generator=generator)


FAMILIES = {
    "gpt": (Gpt, tokens, lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
    "conv net": (ConvNet, images, nullcontext),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_healthy_step_equals_its_re_run_and_training_stays_as_it_is(out, tmp_path, family):
    kind, batch, context = FAMILIES[family]
    model = made(kind)
    [action] = train(out, model, batch, context=context)
    assert EQUAL in action, action
    rng, plain = torch.get_rng_state(), made(kind)
    train(tmp_path, plain, batch, context=context, watched=False)
    assert torch.equal(rng, torch.get_rng_state())
    for name, value in plain.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


@pytest.mark.parametrize(("family", "part"), [("gpt", "blocks.1.dropout"), ("conv net", "norm")])
def test_an_element_that_only_the_step_had_is_a_passing_fault(out, family, part):
    kind, batch, context = FAMILIES[family]
    model = made(kind)
    [action] = train(out, model, batch, context=context, **corrupt_once(model.get_submodule(part)))
    assert FAULT in action, action
    assert re.search(r"\d+ of \d+ elements of the output differ: at \[.*\] the re-run gives \S+, the step had ", action)
    assert "are bitwise equal; the step computed" in action
    assert "passing fault" in action


def model_output(**parts):
    outputs = pytest.importorskip("transformers.modeling_outputs")
    return outputs.CausalLMOutput(**parts)


@pytest.mark.parametrize("made_by", [SimpleNamespace, dict, model_output])
def test_the_sentence_has_both_losses(out, made_by):
    model = made(lambda: WithLoss(made_by))
    losses = []

    def loss(output):
        losses.append(output["loss"] if made_by is dict else output.loss)
        return losses[-1]

    [action] = train(out, model, loss=loss, **corrupt_once(model.net.first, 2.5))
    assert f", the step had {losses[AT].item():.5g}." in action, action
    given = float(re.search(r"the re-run gives loss (\S+),", action)[1])
    assert 0 < abs(given - losses[AT].item()) < 10


def test_two_numbers_that_differ_in_the_last_bit_are_told_apart(out):
    model = made(Dense)
    torch.nn.init.zeros_(model.last.weight)
    loss = lambda output: model.first(torch.ones(1, 6)).square().mean() + output.sum() * 0  # noqa: E731
    near = torch.nextafter(model.last.bias[2].detach(), torch.tensor(9.0)).item()
    [action] = train(out, model, loss=loss, **corrupt_once(model, near))
    assert "1 of 15 elements of the output differs: at [0, 2] the re-run gives" in action, action
    given, had = re.search(r"the re-run gives (\S+), the step had (\S+)\. ", action).groups()
    assert given != had
    assert float(had) == pytest.approx(near, rel=1e-8)


class OwnNoise(nn.Module):
    """Adds numbers of a generator that nobody restores."""

    def __init__(self):
        super().__init__()
        self.net = Dense()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x):
        y = self.net(x)
        return y + torch.randn(y.shape, generator=self.generator)


def test_outputs_that_never_repeat_blame_no_passing_fault(out):
    [action] = train(out, made(OwnNoise))
    assert "two more runs give different outputs: the device is faulty, or an operation is not deterministic" in action


class OtherKernels(nn.Module):
    """Computes otherwise without gradients, as the fast path of torch's transformer layers does."""

    def forward(self, x):
        return x * 3 / 3 if torch.is_grad_enabled() else x * 1.0001


def test_a_pass_that_runs_otherwise_without_gradients_equals_the_step(out):
    [action] = train(out, made(lambda: Dense(OtherKernels())))
    assert EQUAL in action, action


def test_a_later_hook_that_replaces_the_output_does_not_matter(out):
    model = made(Dense)

    def before(step):
        if step == 0:
            model.register_forward_hook(lambda module, args, output: output * 3)

    [action] = train(out, model, before=before)
    assert EQUAL in action, action


def test_a_loss_alone_is_a_suspect_without_a_dump_and_its_pass_is_compared(out):
    model = made(Dense)
    config = {"output_dir": str(out), "strict": True, "on_incident": {"dump": {"replay": True}}}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        for step in range(STEPS):
            loss = model(rows(generator)).square().mean()
            loss.backward()
            monitor.log(loss=float("nan") if step == AT else loss)
            optimizer.step()
            optimizer.zero_grad()
        monitor.flush()
        [action] = [a for i in monitor.incidents for a in i.actions if a.startswith("replay")]
    assert "no dump, as the forward pass uses none of the suspects" in action, action
    assert "a re-run gives the outputs of the step to the bit" in action, action
