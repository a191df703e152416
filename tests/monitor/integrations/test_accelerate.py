"""A loop of one's own with accelerate is watched through its tracker."""

import pandas as pd
import pytest
import torch
from tiny_models import mlp

accelerate = pytest.importorskip("accelerate")


@pytest.fixture(autouse=True)
def _own_state():
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def train(accelerator, model, optimizer, steps):
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        for _ in range(accelerator.gradient_accumulation_steps):
            with accelerator.accumulate(model):
                loss = model(torch.randn(4, 8, generator=generator)).square().mean()
                accelerator.backward(loss)
                accelerator.log({"loss": loss.detach(), "note": "text", "grad_norm": 1.5}, step=step)
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_what_is_logged_to_the_accelerator_stands_beside_the_model_and_its_state_in_the_checkpoint(
    out, tmp_path, accumulation
):
    from trainsentry.integrations import AccelerateTracker

    def begin():
        torch.manual_seed(0)
        tracker = AccelerateTracker({"output_dir": str(out), "strict": True})
        accelerator = accelerate.Accelerator(
            cpu=True, log_with=tracker, gradient_accumulation_steps=accumulation, project_dir=str(tmp_path)
        )
        model = mlp()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        accelerator.init_trackers("run")
        tracker.watch(model, optimizer)
        accelerator.register_for_checkpointing(tracker.monitor)
        return tracker, accelerator, model, optimizer

    tracker, accelerator, model, optimizer = begin()
    train(accelerator, model, optimizer, 3)
    assert accelerator.get_tracker("trainsentry", unwrap=True) is tracker.monitor
    accelerator.save_state(str(tmp_path / "state"))
    accelerator.end_training()
    scalars = pd.read_csv(out / "rank0" / "scalars_0-999.csv")
    assert list(scalars[scalars.name == "loss"].groupby("step").size()) == [accumulation] * 3
    assert not (scalars.name == "note").any()

    tracker, accelerator, model, optimizer = begin()
    accelerator.load_state(str(tmp_path / "state"))
    train(accelerator, model, optimizer, 2)
    frame = tracker.monitor.records()
    accelerator.end_training()
    assert sorted(frame.step.unique()) == [3, 4], "it goes on where the checkpoint was made"
