"""Random numbers that a program draws twice are told, in two families of models; programs that draw on are quiet."""

import contextlib

import pytest
import torch
from torch import nn
from two_families import CONFIGURATIONS, FAMILIES, FAULT

import trainsentry

both_families = pytest.mark.parametrize("family", FAMILIES)


class HiddenDropout(nn.Dropout):
    """Draws from a generator of its own beginning where it was told to, and leaves torch's as it was."""

    repeats = False

    def forward(self, x):
        with torch.random.fork_rng() if self.repeats else contextlib.nullcontext():
            if self.repeats:
                torch.manual_seed(7)
            return super().forward(x)


def train(tmp_path, family, collect="default", before=lambda step, model: None, after=lambda step, model: None):
    """Train a family with dropout before its head; return the incidents that are no notes."""
    make, data, *_ = FAMILIES[family]
    torch.manual_seed(0)
    model = make()
    model.head = nn.Sequential(HiddenDropout(0.2), model.head)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {"output_dir": str(tmp_path), "strict": True, "on_incident": False, "collect": CONFIGURATIONS[collect]}
    generator = torch.Generator().manual_seed(1)
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        for step in range(FAULT + 25):
            inputs, targets = data(generator)
            before(step, model)
            loss = nn.functional.cross_entropy(model(inputs).flatten(0, -2), targets)
            loss.backward()
            monitor.log(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
            after(step, model)
        monitor.flush()
        return sorted((i for i in monitor.incidents if i.severity != "note"), key=lambda i: i.id)


def evaluate(step, model, every=30, *, puts_back=False):
    """Evaluate with the same random numbers each time, which are then those of the training too, unless put back."""
    if step % every == every - 1:
        with torch.random.fork_rng() if puts_back else contextlib.nullcontext():
            torch.manual_seed(3)
            model.eval()(torch.randint(0, 32, (2, 12)) if hasattr(model, "embedding") else torch.randn(2, 3, 8, 8))
            model.train()


@both_families
def test_an_evaluation_that_seeds_the_trainings_numbers_is_told_at_the_first_pass_after_it(tmp_path, family):
    [found] = train(tmp_path, family, after=evaluate)
    assert (found.name, found.quantity, found.kind) == ("random numbers on cpu", "training", "stale")
    assert found.step == 60
    assert "torch's random numbers on cpu at step 60 are those of step 30 again" in found.summary


@both_families
def test_an_evaluation_that_puts_the_numbers_back_is_quiet(tmp_path, family):
    assert train(tmp_path, family, after=lambda s, m: evaluate(s, m, puts_back=True)) == []


@both_families
def test_a_seed_before_each_pass_is_told_once_where_it_comes_late_and_never_where_it_is_the_programs_way(
    tmp_path, family
):
    def seed(step, _):
        if step >= begins:
            torch.manual_seed(5)

    begins = FAULT
    [found] = train(tmp_path / "late", family, before=seed)
    assert (found.name, found.step) == ("random numbers on cpu", FAULT + 1)
    begins = 0
    assert train(tmp_path / "always", family, before=seed) == []


@both_families
def test_a_dropout_that_draws_the_same_mask_at_each_step_is_named(tmp_path, family):
    def repeat(step, model):
        model.head[0].repeats = step >= FAULT

    [found, *_] = train(tmp_path, family, "everything", before=repeat)
    assert (found.name, found.quantity, found.kind) == ("head.0.output.0", "activation_output", "stale")
    assert found.step == FAULT
    assert "exactly as many zeros at each sample since step 93" in found.summary


@both_families
def test_fresh_masks_are_quiet(tmp_path, family):
    assert train(tmp_path, family, "everything") == []
