"""One of several optimizers that is stepped no more is told of by its parameters; turns and stages are not."""

import pytest
import torch
from torch import nn
from weight_loop import told_by

import trainsentry
from trainsentry.collectors.series import SeriesTable
from trainsentry.collectors.torch.parameters.gradients import OptimizedParameters
from trainsentry.collectors.torch.parameters.idle_optimizers import RESTS, IdleOptimizers
from trainsentry.collectors.torch.rows.step_rows import StepRows
from trainsentry.collectors.torch.sharding.model_names import ModelNames

AT, STEPS = 40, 300


class Loop:
    """A model whose matrices one optimizer updates, and whose rest another does, as Muon and AdamW."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        parts = ([p for p in self.model.parameters() if (p.dim() == 2) == is_matrix] for is_matrix in (True, False))
        self.optimizers = [torch.optim.SGD(part, lr=0.01) for part in parts]
        self.rows, names = StepRows(SeriesTable(), 0.0), ModelNames()
        names.add([self.model], self.optimizers)
        self.idle = IdleOptimizers(self.rows, OptimizedParameters(names, {}))

    def run(self, stepped, clears=lambda step: (0, 1), frozen_at=STEPS, clips=False):
        """Return what is told, by step; `stepped(step)` are the optimizers of a step, in their order."""
        told = {}
        for step in range(STEPS):
            self.model(torch.randn(3, 4)).square().mean().backward()
            if step == frozen_at:
                for p in self.optimizers[1].param_groups[0]["params"]:
                    p.requires_grad_(requires_grad=False)
            if clips:
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            for i in stepped(step):
                self.idle.note(self.optimizers[i], self.optimizers, step)
                self.optimizers[i].step()
            for i in clears(step):
                self.optimizers[i].zero_grad()
            told |= {step: found} if (found := told_by(self.rows)) else {}
        return told


@pytest.mark.parametrize("clears", [(0, 1), (0,)])
def test_an_optimizer_that_is_forgotten_is_told_of_by_its_parameters(clears):
    told = Loop().run(lambda step: (0, 1) if step < AT else (0,), lambda step: clears)
    [(step, rows)] = told.items()
    assert set(rows) == {"stopped_writes.0.bias", "stopped_writes.2.bias"}
    assert AT + RESTS <= step <= AT + RESTS + 3
    assert all(AT <= step - since <= AT + 1 for since in rows.values())


@pytest.mark.parametrize(
    ("stepped", "changes"),
    [
        (lambda step: (0, 1), {}),
        (lambda step: (0, 0, 0, 0, 0, 1), {}),
        (lambda step: (0, 1) if step % 9 == 0 else (0,), {}),
        (lambda step: (0,), {}),
        (lambda step: (0, 1) if step < 10 else (0,), {}),
        (lambda step: (0, 1) if step < AT or step > AT + RESTS - 5 else (0,), {}),
        (lambda step: (0, 1) if step < AT else (0,), {"frozen_at": AT}),
        (lambda step: (0, 1) if step < AT else (0,), {"frozen_at": AT, "clips": True, "clears": lambda step: (0,)}),
        (lambda step: (0, 1) if step < AT or step % 100 > 90 else (0,), {}),  # a critic that is too good rests
        (lambda step: (0,), {"clears": lambda step: (0,)}),
    ],
)
def test_turns_rests_and_stages_are_nothing(stepped, changes):
    assert Loop().run(stepped, **changes) == {}


def test_parameters_that_another_optimizer_holds_too_are_updated():
    loop = Loop()
    loop.optimizers[1] = torch.optim.SGD(loop.model.parameters(), lr=0.01)
    assert loop.run(lambda step: (0, 1) if step < AT else (1,)) == {}


def test_in_a_training_the_forgotten_optimizer_s_weights_are_the_first_suspects(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 16))
    muon = torch.optim.Muon([model[1].weight], lr=0.02)
    adam = torch.optim.AdamW([*model[0].parameters(), *model[3].parameters()], lr=3e-3)
    with trainsentry.TrainMonitor({"output_dir": str(tmp_path)}).watch(model, [muon, adam]) as monitor:
        for step in range(2 * STEPS):
            loss = nn.functional.cross_entropy(model(torch.arange(16)), (3 * torch.arange(16) + 1) % 16)
            loss.backward()
            monitor.log(loss=loss.detach())
            muon.step()
            if step < AT:
                adam.step()
            muon.zero_grad()
            adam.zero_grad()
    [incident] = monitor.incidents
    assert incident.name in {"0.weight", "3.weight", "3.bias"}
    assert AT - 1 <= incident.step <= AT + 2
    assert "is not updated any more since step" in incident.summary
