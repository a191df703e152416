"""A distributed checkpoint holds the monitor among its states, as in torchtitan, and gives all of it back."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import trainsentry

SAVED_AT, END = 40, 60


class App:
    """A model and its optimizer, as one state; an optimizer without state is stepped to make some."""

    def __init__(self, make):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.optimizer = make(self.model.parameters())

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state):
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **parts)

    def train(self, monitor, steps):
        for step in steps:
            torch.manual_seed(step)
            x = torch.randn(16, 8)
            loss = (self.model(x) - x.sum(dim=1, keepdim=True)).square().mean()
            loss.backward()
            monitor.log(loss=loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
        monitor.flush()


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-2)


def saved(app, out, folder):
    """Train, save, and go on; return the weights at the end."""
    with trainsentry.TrainMonitor({"output_dir": str(out)}).watch(app.model, app.optimizer) as monitor:
        app.train(monitor, range(SAVED_AT))
        dcp.save({"app": app, "trainsentry": monitor}, checkpoint_id=folder, no_dist=True)
        learned = monitor.state_dict()["detection"]
        app.train(monitor, range(SAVED_AT, END))
        assert not monitor.incidents
    return copy.deepcopy(app.model.state_dict()), learned


@pytest.mark.parametrize("make", [adamw, sgd])
@pytest.mark.parametrize("is_watched", [True, False])
def test_a_run_goes_on_from_it_whether_it_is_loaded_before_the_model_is_watched_or_after(
    out, tmp_path, make, is_watched
):
    weights, learned = saved(App(make), tmp_path / "before", tmp_path / "checkpoint")
    app, monitor = App(make), trainsentry.TrainMonitor({"output_dir": str(out)})
    if is_watched:
        monitor.watch(app.model, app.optimizer)
    dcp.load({"app": app, "trainsentry": monitor}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    assert is_watched or monitor.state_dict()["detection"] == learned
    with monitor if is_watched else monitor.watch(app.model, app.optimizer):
        app.train(monitor, range(SAVED_AT, END))
        assert monitor.state_dict()["step"] == END
    assert not monitor.incidents
    assert all(torch.equal(weights[name], weight) for name, weight in app.model.state_dict().items())


def test_a_step_that_cannot_make_state_leaves_the_next_ones_to_the_training(out):
    app = App(adamw)

    def fails(*_):
        handle.remove()
        raise ArithmeticError

    with trainsentry.TrainMonitor({"output_dir": str(out)}).watch(app.model, app.optimizer) as monitor:
        handle = app.optimizer.register_step_pre_hook(fails)
        with pytest.raises(ArithmeticError):
            app.state_dict()
        for group in app.optimizer.param_groups:
            group["lr"] = 1e-2
        app.train(monitor, range(3))
        assert monitor.state_dict()["step"] == 3


@pytest.mark.parametrize("make", [adamw, sgd])
def test_a_step_that_only_makes_state_is_none_of_the_training(out, make):
    """It comes before the first step, and at each checkpoint where an optimizer keeps no state."""
    app, config = App(make), {"output_dir": str(out), "collect": {"gradients": {"every": 1}, "updates": {"every": 1}}}
    with trainsentry.TrainMonitor(config).watch(app.model, app.optimizer) as monitor:
        for start in range(0, 100, 10):
            app.state_dict()
            app.train(monitor, range(start, start + 10))
            assert monitor.state_dict()["step"] == start + 10
    assert not monitor.incidents
