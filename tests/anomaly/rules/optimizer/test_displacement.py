"""A weight moves no further than its optimizer's updates can move it; whatever training does stays within the bound."""

import pytest
import torch
from tiny_models import mlp

import trainsentry
from trainsentry.anomaly.rules.optimizer.displacement import DisplacementRule


class Rotating(torch.optim.AdamW):
    """Turns its updates into another basis now and then, as SOAP does: single elements get many others' updates."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=3e-2)
        self.param_groups[0]["precondition_frequency"] = 10
        self.updates = 0

    def step(self, closure=None):
        loss = super().step(closure)
        self.updates += 1
        if self.updates == 83:
            with torch.no_grad():
                self.param_groups[0]["params"][0][0, 0] += 2.0
        return loss


OPTIMIZERS = {
    "rotating": Rotating,
    "Adam": lambda p: torch.optim.Adam(p, lr=3e-2, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=3e-2, betas=(0.9, 0.95), weight_decay=1.0),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=3e-2),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=3e-2),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=3e-2),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.95, weight_decay=1e-2),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "climbs": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, maximize=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


def found(tmp_path, make, harm=None, steps=120, *, extra=False):
    """Train with spikes and pauses in the gradients; return what the rule says."""
    torch.manual_seed(0)
    model = mlp()
    if extra:
        model.copied = torch.nn.Parameter(torch.ones(30), requires_grad=False)
    optimizer = make(model.parameters())
    width = next(p for p in model.parameters() if p.dim() == 2).shape[1]
    config = {"output_dir": str(tmp_path), "on_incident": False, "strict": True}
    with trainsentry.TrainMonitor(config).watch(model, optimizer):
        for step in range(steps):
            optimizer.zero_grad(set_to_none=step % 7 != 3)
            scale = 100.0 if step % 50 == 33 else 1.0
            (model(torch.randn(8, width)).square().mean() * scale).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.param_groups[0]["lr"] *= 0.99
            if harm is not None:
                harm(model, step)
            optimizer.step()
    lines = (
        (tmp_path / "rank0" / "anomalies.jsonl").read_text()
        if (tmp_path / "rank0" / "anomalies.jsonl").exists()
        else ""
    )
    return [line for line in lines.splitlines() if f'"{DisplacementRule.name}"' in line]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_stays_within_its_bound(tmp_path, name):
    assert found(tmp_path, OPTIMIZERS[name]) == []


@pytest.mark.parametrize("name", ["AdamW", "momentum"])
def test_one_weight_that_was_overwritten_is_named_at_the_next_sample(tmp_path, name):
    def overwrite(model, step):
        if step == 83:
            with torch.no_grad():
                next(model.parameters())[0, 0] = 30.0

    [line] = found(tmp_path, OPTIMIZERS[name], overwrite)
    assert '"step": 90' in line
    assert '"last_clean": 80' in line
    assert "weight" in line


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}, True),  # Megatron's
        ({"initial_lr": 1e-2, "max_lr": 3e-2, "min_lr": 0.0, "base_momentum": 0.85, "max_momentum": 0.95}, True),
        ({"lr_scale": 0.5, "layer_id": 3, "wd_scale": 1.0}, True),
        ({"precondition_frequency": 10}, False),
    ],
    ids=["by Megatron", "by schedules", "by a user", "of another optimizer"],
)
def test_a_group_may_have_options_that_change_no_update(tmp_path, options, told):
    def overwrite(model, step):
        if step == 83:
            with torch.no_grad():
                next(model.parameters())[0, 0] = 30.0

    lines = found(tmp_path, lambda p: torch.optim.AdamW([{"params": list(p), **options}], lr=3e-2), overwrite)
    assert len(lines) == told


@pytest.mark.parametrize("name", ["AdamW", "momentum"])
def test_a_sign_that_flips_shows_where_no_size_changes(tmp_path, name):
    def harm(model, step):
        with torch.no_grad():
            weight = next(model.parameters()).view(-1)
            if step == 10:
                weight[3] = 2.0  # once: rules begin after three samples
            if step == 83:
                weight[3] = -weight[3]

    [line] = found(tmp_path, OPTIMIZERS[name], harm)
    assert '"step": 90' in line
    assert '"statistic": "min"' in line or '"statistic": "max"' in line


@pytest.mark.parametrize(("dtype", "count"), [(torch.float32, 1), (torch.bfloat16, 0)])
def test_a_small_leap_counts_where_rounding_makes_none(tmp_path, dtype, count):
    """A learned temperature that is set back: 3 percent of it, where updates move it by less than a hundredth."""
    torch.manual_seed(0)
    scale = torch.nn.Parameter(torch.tensor(2.8, dtype=dtype))
    optimizer = torch.optim.AdamW([scale], lr=1e-4, weight_decay=0.0)
    model = torch.nn.Module()
    model.scale = scale
    config = {"output_dir": str(tmp_path), "on_incident": False, "strict": True}
    with trainsentry.TrainMonitor(config).watch(model, optimizer):
        for step in range(120):
            optimizer.zero_grad()
            (scale * torch.randn(())).square().backward()
            if step == 83:
                with torch.no_grad():
                    scale.mul_(0.97)
            optimizer.step()
    path = tmp_path / "rank0" / "anomalies.jsonl"
    said = path.read_text() if path.exists() else ""
    assert sum(f'"{DisplacementRule.name}"' in line for line in said.splitlines()) == count


def test_several_weights_at_once_are_an_intention(tmp_path):
    def load(model, step):
        if step == 83:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(30.0)

    assert found(tmp_path, OPTIMIZERS["AdamW"], load) == []


def test_a_loop_that_rescales_a_weight_now_and_then_is_told_of_once(tmp_path):
    def rescale(model, step):
        if step % 20 == 15:
            with torch.no_grad():
                next(model.parameters()).mul_(5.0 if step % 40 == 15 else 0.2)

    assert len(found(tmp_path, OPTIMIZERS["AdamW"], rescale, steps=160)) <= 1


def test_a_copy_of_other_weights_that_no_gradient_moves_is_not_judged(tmp_path):
    def copy(model, step):
        if step == 83:
            model.copied.mul_(50.0)

    def make(parameters):
        return torch.optim.AdamW(list(parameters), lr=1e-2)

    assert found(tmp_path, make, copy, extra=True) == []
