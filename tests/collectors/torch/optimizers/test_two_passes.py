"""An optimizer of two passes, as for sharpness-aware minimisation, is watched by the base inside it."""

import pandas as pd
import torch
from tiny_models import EVERY_STEP, mlp

import trainsentry


class TwoPasses(torch.optim.Optimizer):
    """An optimizer as many projects copy it: a base inside, a step for each of two passes, none of its own."""

    def __init__(self, parameters, **options):
        super().__init__(parameters, options)
        self.base_optimizer = torch.optim.SGD(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups
        self.kept = []

    @torch.no_grad()
    def first_step(self):
        """Climb."""
        self.kept = [(p, p.clone()) for group in self.param_groups for p in group["params"]]
        for parameter, _ in self.kept:
            parameter.add_(0.05 * parameter.grad / parameter.grad.norm())
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        """Come back, and descend by the gradients from above."""
        for parameter, before in self.kept:
            parameter.copy_(before)
        self.base_optimizer.step()
        self.zero_grad()

    def step(self, closure=None):
        """Refuse."""
        raise RuntimeError(closure)


def test_an_optimizer_of_two_passes_is_watched_by_its_base(tmp_path):
    model = mlp()
    optimizer = TwoPasses(model.parameters(), lr=0.05, momentum=0.9)
    config = {"output_dir": str(tmp_path), "collect": EVERY_STEP, "on_incident": False}
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        for _ in range(40):
            x = torch.randn(4, next(model.parameters()).shape[1])
            model(x).square().mean().backward()
            optimizer.first_step()
            model(x).square().mean().backward()
            optimizer.second_step()
    assert sorted(pd.concat(map(pd.read_csv, tmp_path.glob("rank0/update*.csv")))["step"].unique()) == list(range(40))
    assert monitor.incidents == ()
