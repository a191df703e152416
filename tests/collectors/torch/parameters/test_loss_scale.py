"""Under loss scaling, gradients are unscaled exactly and skipped steps are recorded as skipped."""

import pickle

import pytest
import torch
from tiny_models import EVERY_STEP, mlp

import trainsentry


def loop(out, *, fused, bad_steps=(), steps=6, unscale=False, config=None):
    """Train with a GradScaler on CPU; at `bad_steps` the loss is Inf. Return monitor, scaler, plain norms."""
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    settings = {"output_dir": str(out), "strict": True, "collect": EVERY_STEP, **(config or {})}
    monitor = trainsentry.TrainMonitor(settings).watch(model, optimizer, grad_scaler=scaler)
    plain = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 8)).pow(2).mean()
        if step in bad_steps:
            loss = loss * float("inf")
        plain.append(torch.autograd.grad(loss, model[0].weight, retain_graph=True)[0].norm().item())
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return monitor, scaler, plain


@pytest.mark.parametrize(("fused", "unscale"), [(False, False), (True, False), (False, True), (True, True)])
def test_gradients_are_recorded_unscaled(out, fused, unscale):
    monitor, _, plain = loop(out, fused=fused, unscale=unscale)
    with monitor:
        rows = monitor.records().query("quantity == 'gradient' and name == '0.weight'")
        assert rows["norm"].tolist() == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize("fused", [False, True])
def test_every_skipped_step_is_there_and_raises_no_alarm(out, fused):
    monitor, _, _ = loop(out, fused=fused, bad_steps=(2, 4))
    with monitor:
        gradients = monitor.records().query("quantity == 'gradient' and name == '0.weight'")
        assert gradients["step"].tolist() == list(range(6))
        bad = gradients[gradients["nans"] + gradients["infs"] > 0]
        assert bad["step"].tolist() == [2, 4]
        scale = monitor.records().query("quantity == 'loss_scale'")["value"].tolist()
        assert scale == [1024.0, 1024.0, 1024.0, 512.0, 512.0, 256.0]
        monitor.flush()
        assert monitor.incidents == ()


def test_a_skipped_step_has_no_update_and_is_counted_apart(out):
    import json

    config = {"overflow_check": {"overflow_nums": 1}}
    monitor, _, _ = loop(out, fused=False, bad_steps=(2,), config=config)  # does not stop
    with monitor:
        assert 2 not in set(monitor.records().query("quantity == 'update'")["step"])
    status = json.loads((out / "rank0" / "status.json").read_text())
    assert (status["overflow_steps"], status["skipped_overflow_steps"], status["skipped_steps"]) == (0, 1, 1)


def test_close_gives_the_scalers_class_its_own_step_back(out):
    original = torch.amp.GradScaler.__dict__["step"]
    monitor, scaler, _ = loop(out, fused=False, steps=1)
    assert torch.amp.GradScaler.__dict__["step"] is not original
    pickle.dumps(scaler)
    monitor.close()
    assert torch.amp.GradScaler.__dict__["step"] is original


def test_micro_steps_are_unscaled_from_the_first_and_the_row_the_optimizer_takes_is_clipped(out):
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    config = {
        "output_dir": str(out),
        "strict": True,
        "collect": {"gradients": {"per_micro_step": True}, "activations": False},
    }
    with trainsentry.TrainMonitor(config).watch(model, optimizer, grad_scaler=scaler) as monitor:
        for _ in range(2):
            optimizer.zero_grad()
            sums, total = [], 0.0
            for _ in range(2):
                loss = model(torch.randn(8, 8)).pow(2).mean()
                total = total + torch.autograd.grad(loss, model[0].weight, retain_graph=True)[0]
                sums.append(total.norm().item())
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            clipped = model[0].weight.grad.norm().item()
            scaler.step(optimizer)
            scaler.update()
            rows = monitor.records(last=1).query("quantity == 'gradient' and name == '0.weight'")
            rows = rows.sort_values("micro_step")
            assert rows["micro_step"].tolist() == [0, 1]
            assert rows["norm"].tolist() == pytest.approx([sums[0], clipped], rel=1e-5)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("logged", "stopped_at"), [(True, 13), (False, 15)])
def test_a_broken_weight_is_found_although_the_scaler_skips_every_step(out, fused, logged, stopped_at):
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    config = {"output_dir": str(out), "strict": True, "on_incident": {"stop": True}}
    monitor = trainsentry.TrainMonitor(config).watch(model, optimizer)

    def train_with_scaler():
        for step in range(40):
            if step == 13:
                model[0].weight.detach()[0, 0] = float("nan")
            optimizer.zero_grad()
            loss = model(torch.randn(8, 8)).pow(2).mean()
            if logged:
                monitor.log(loss=loss)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    with monitor:
        with pytest.raises(trainsentry.TrainingStopped) as stopped:
            train_with_scaler()
        assert stopped.value.incident.name == "0.weight"
        assert stopped.value.step == stopped_at
        assert monitor.incidents[0].quantity == "parameter"


def test_a_skip_of_a_fused_optimizer_is_counted(out):
    import json

    monitor, _, _ = loop(out, fused=True, bad_steps=(2,))
    monitor.close()
    assert json.loads((out / "rank0" / "status.json").read_text())["skipped_steps"] == 1


@pytest.mark.parametrize("fused", [False, True])
def test_an_unsampled_step_leaves_nothing_of_the_scaler(out, fused):
    config = {"collect": {part: {"every": 4} for part in EVERY_STEP}}
    config["collect"]["activations"]["inputs"] = False
    monitor, _, _ = loop(out, fused=fused, config=config)
    with monitor:
        assert sorted(set(monitor.records()["step"])) == [0, 4]
