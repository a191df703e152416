"""Lightning's own Trainer is watched by one callback."""

import json

import pandas as pd
import pytest
import torch
from torch import nn

import trainsentry

lightning = pytest.importorskip("lightning.pytorch")

STEPS = 6


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def training_step(self, batch, index):
        loss = self.net(batch[0]).square().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Gan(Model):
    """Two optimizers, stepped by hand."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Linear(4, 1)

    def training_step(self, batch, index):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.critic(self.net(batch[0])).square().mean())
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.01) for part in (self.net, self.critic)]


class Break(lightning.Callback):
    """Puts a NaN into a weight, or raises, before a batch."""

    def __init__(self, batch, error=None):
        self.batch, self.error = batch, error

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == self.batch and self.error is not None:
            raise self.error
        if batch_idx == self.batch:
            pl_module.net[2].weight.data[0, 0] = torch.nan


def fit(folder, model, *callbacks, checkpoint=None, **settings):
    data = torch.utils.data.TensorDataset(torch.randn(64, 8, generator=torch.Generator().manual_seed(1)))
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, default_root_dir=folder, callbacks=list(callbacks), logger=False,
        **{"max_steps": STEPS, **quiet, **settings},
    )  # fmt: skip
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=4), ckpt_path=checkpoint)
    return trainer


def callback(out, **config):
    from trainsentry.integrations import LightningCallback

    return LightningCallback({"output_dir": str(out), "strict": True, **config})


def steps_of(out, quantity="gradient"):
    paths = (out / "rank0").glob(f"{quantity}_*.csv")
    return sorted(step for path in paths for step in pd.read_csv(path).step.unique())


@pytest.mark.parametrize("accumulation", [1, 2])
def test_steps_and_losses_are_recorded_and_training_is_the_same_to_the_bit(out, tmp_path, accumulation):
    bare, model = Model(), Model()
    fit(tmp_path, bare, accumulate_grad_batches=accumulation)
    fit(tmp_path, model, callback(out), accumulate_grad_batches=accumulation)
    for ours, theirs in zip(model.parameters(), bare.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert steps_of(out) == list(range(STEPS))
    rows = pd.read_csv(out / "rank0" / "gradient_0-999.csv")
    assert set(rows.name) == {"net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"}
    scalars = pd.read_csv(out / "rank0" / "scalars_0-999.csv")
    assert list(scalars[scalars.name == "loss"].groupby("step").size()) == [accumulation] * STEPS


def test_the_part_that_a_module_calls_in_its_step_gets_the_data(out, tmp_path):
    """Lightning calls `training_step`, and never the module itself."""
    fit(tmp_path, Model(), callback(out))
    inputs = pd.read_csv(out / "rank0" / "activation_input_0-999.csv")
    assert list(inputs[inputs.name == "input.net.0"].step) == list(range(1, STEPS))


class Normalised(Model):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def test_the_last_pass_of_weight_averaging_trains_nothing_and_is_not_watched(out, tmp_path):
    """Lightning swaps the averages in, and takes the statistics of batch norms anew in an epoch without gradients."""
    watching, watched = callback(out), []

    class Looks(lightning.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.fit_loop._skip_backward:
                watched.append(watching.monitor)

    averaging = lightning.callbacks.StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=2)
    fit(tmp_path, Normalised(), averaging, watching, Looks(), max_steps=-1, max_epochs=4)
    assert watched == [None] * 16
    assert watching.incidents == ()
    assert steps_of(out)[-1] == 4 * 16 - 1


def test_several_optimizers_stepped_by_hand_make_one_step_a_batch(out, tmp_path):
    fit(tmp_path, Gan(), callback(out), max_steps=2 * STEPS)  # Lightning counts each optimizer's
    assert steps_of(out) == list(range(STEPS))


def test_a_stop_ends_the_training_as_the_trainer_likes_it_and_says_why(out, tmp_path):
    watching = callback(out, on_incident={"stop": True})
    trainer = fit(tmp_path, Model(), watching, Break(3))  # returns
    assert trainer.global_step == 4, "the step of the incident is the last"
    assert "net.2.weight" in watching.stopped.reason
    assert json.loads((out / "rank0" / "status.json").read_text())["state"] == "closed"
    assert trainer.logged_metrics["trainsentry_incidents"] == 1
    assert [incident.id for incident in watching.incidents] == [watching.stopped.incident.id], "after the training too"


def test_an_exception_of_the_training_closes_the_monitor(out, tmp_path):
    watching = callback(out)
    with pytest.raises(KeyError):
        fit(tmp_path, Model(), watching, Break(3, KeyError("planted")))
    assert watching.monitor is None
    assert json.loads((out / "rank0" / "status.json").read_text())["state"] == "closed"


def test_a_resumed_training_goes_on_with_its_steps_and_learned_state(out, tmp_path, monkeypatch):
    loaded = []
    load = trainsentry.TrainMonitor.load_state_dict
    monkeypatch.setattr(
        trainsentry.TrainMonitor, "load_state_dict", lambda self, state: (loaded.append(state), load(self, state))
    )
    saver = lightning.callbacks.ModelCheckpoint(tmp_path / "saved", every_n_train_steps=3)
    fit(tmp_path, Model(), callback(out), saver, max_steps=3, enable_checkpointing=True)
    assert loaded == []
    fit(tmp_path, Model(), callback(out), checkpoint=saver.best_model_path)
    assert loaded[0]["step"] == 3
    assert json.loads(loaded[0]["detection"])["learned"]["series"]
    assert steps_of(out) == list(range(STEPS))
