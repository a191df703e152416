"""What must hold in any training is checked in real ones: a breach is named, and none is seen where there is none."""

import itertools
import json
import math
import sys

import pytest
import torch
from torch import nn
from two_families import FAMILIES

import trainsentry

STEPS, FAULT = 130, 93


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=2e-3, weight_decay=0.02),
    "adam with decay": lambda p: torch.optim.Adam(p, lr=2e-3, weight_decay=0.02),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "dampened": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, dampening=0.5),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "learns fast": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "climbs": lambda p: torch.optim.AdamW(p, lr=1e-4, maximize=True),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=2e-3, amsgrad=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=2e-3),
    "centred": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adadelta": torch.optim.Adadelta,
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.02),
    "two groups": lambda p: torch.optim.AdamW(_halves(list(p)), lr=2e-3),
}


def _halves(parameters):
    middle = len(parameters) // 2
    return [
        {"params": parameters[:middle]},
        {"params": parameters[middle:], "betas": (0.95, 0.95), "weight_decay": 0.1},
    ]


FOLLOWED = {
    "climbs": ("exp_avg", "exp_avg_sq"),
    "amsgrad": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "adam with decay": ("exp_avg",),
    "nadam": ("exp_avg", "exp_avg_sq"),
    "dampened": ("momentum_buffer",),
    "adamax": ("exp_avg", "exp_inf"),
    "rmsprop": ("square_avg",),
    "centred": ("square_avg", "grad_avg"),
    "adagrad": ("sum",),
    "adadelta": ("square_avg",),
    "asgd": ("ax",),
    "two groups": ("exp_avg", "exp_avg_sq"),
}
"""The states of each optimizer that must follow from gradients, weights and their own past."""

CONFIGURATIONS = {
    "default": {},
    "everything": {p: {"every": 1} for p in ("parameters", "optimizer_state", "updates", "activations")},
}
STATISTICS = {"default": ["norm", "mean"], "everything": ["norm", "mean", "min", "max", "alignment"]}


def train(
    tmp_path, family, optimizer="adamw", collect="default", harm=None, batch=None, steps=STEPS, clip=None, dump=False
):
    """Train a family; `harm(model, optimizer, step)` runs before each update, `batch(step, given)` changes batches."""
    make, data, *_ = FAMILIES[family]
    torch.manual_seed(0)
    model = make()
    stepper = OPTIMIZERS[optimizer](model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(stepper, lambda s: min((s + 1) / 20, 1) * (1 - s / (2 * STEPS)))
    config = {
        "output_dir": str(tmp_path),
        "collect": CONFIGURATIONS[collect],
        "statistics": STATISTICS[collect],
        "on_incident": {"dump": dump},
        "strict": True,
    }
    monitor = trainsentry.TrainMonitor(config).watch(model, stepper)
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        given = data(generator)
        inputs, targets = given if batch is None else batch(step, given)
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, -2), targets)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if harm is not None:
            harm(model, stepper, step)
        monitor.log(loss=loss)
        stepper.step()
        stepper.zero_grad()
        schedule.step()
    monitor.flush()
    found = sorted(monitor.incidents, key=lambda i: i.id)
    monitor.close()
    return found


both_families = pytest.mark.parametrize("family", FAMILIES)
both_configurations = pytest.mark.parametrize("collect", CONFIGURATIONS)


@both_families
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_that_do_what_they_say_are_quiet(tmp_path, family, optimizer):
    everything = "default" if optimizer in {"dampened", "rmsprop", "nadam", "learns fast"} else "everything"
    clip = 0.5 if optimizer in {"adamw", "nadam"} else None
    assert train(tmp_path, family, optimizer, everything, clip=clip) == []


@both_families
@both_configurations
@pytest.mark.parametrize("optimizer", ["adamw", "nesterov"])
def test_state_that_does_not_follow_from_its_past_is_named(tmp_path, family, collect, optimizer):
    name = FAMILIES[family][2]
    key = "exp_avg" if optimizer == "adamw" else "momentum_buffer"

    def shift(model, stepper, step):
        if step == FAULT:
            moment = stepper.state[model.get_parameter(name)][key]
            moment.add_(0.2 * moment.square().mean().sqrt())

    [found, *_] = train(tmp_path, family, optimizer, collect, shift)
    assert (found.name, found.quantity) == (name, key)
    assert FAULT <= found.step <= FAULT + 10


@both_families
@pytest.mark.parametrize("optimizer", FOLLOWED)
def test_each_state_of_each_optimizer_is_followed(tmp_path, family, optimizer):
    """Each is clipped, too: what the optimizer is given counts."""
    fault, changed = 45, []

    def shift(model, stepper, step):
        if step == fault:
            matrices = [(name, p) for name, p in model.named_parameters() if p.dim() > 1]
            for (name, p), key in zip(matrices, FOLLOWED[optimizer], strict=False):
                state = stepper.state[p][key]
                state.add_(0.3 * state.square().mean().sqrt() if key != "ax" else state.abs().max())
                changed.append((name, key))

    train(tmp_path, family, optimizer, "everything", shift, steps=60, clip=0.5)
    lines = [json.loads(line) for line in (tmp_path / "rank0" / "anomalies.jsonl").read_text().splitlines()]
    found = {(each["name"], each["quantity"]) for each in lines if each["step"] == fault and each["alarm"]}
    assert changed
    assert found >= set(changed)


@both_families
@both_configurations
def test_a_loader_that_is_stuck_is_named(tmp_path, family, collect):
    kept = {}

    def stuck(step, given):
        return kept.setdefault("batch", given) if step >= FAULT else given

    [found, *_] = train(tmp_path, family, collect=collect, batch=stuck)
    assert (found.quantity, found.name, found.step) == ("data", "input.0", FAULT + 1)
    assert "again and again" in found.summary


@both_families
@both_configurations
def test_an_option_that_changes_is_named_at_its_own_step(tmp_path, family, collect):
    def change(model, stepper, step):
        if step == FAULT:
            stepper.param_groups[0]["betas"] = (0.99, 0.999)

    [found, *_] = train(tmp_path, family, collect=collect, harm=change)
    assert (found.quantity, found.name, found.step) == ("optimizer", "betas.0 of group 0", FAULT)


@both_families
@both_configurations
def test_a_moment_that_is_a_copy_is_named(tmp_path, family, collect):
    name, kept = FAMILIES[family][2], {}

    def stale(model, stepper, step):
        if step >= FAULT:
            moment = stepper.state[model.get_parameter(name)]["exp_avg"]
            moment.copy_(kept.setdefault("moment", moment.clone()))

    [found, *_] = train(tmp_path, family, collect=collect, harm=stale)
    assert (found.name, found.quantity) == (name, "exp_avg")


@both_configurations
@pytest.mark.parametrize(("family", "name"), [("gpt", "mask"), ("resnet", "stem.1.running_var")])
def test_a_buffer_that_is_overwritten_is_named(tmp_path, family, collect, name):
    def overwrite(model, stepper, step):
        if step >= FAULT:
            buffer = model.get_buffer(name)
            buffer.zero_() if family == "gpt" else buffer.fill_(1e4)

    [found, *_] = train(tmp_path, family, collect=collect, harm=overwrite)
    assert (found.name, found.quantity) == (name, "buffer") or collect == "everything"
    assert name in [suspect.name for suspect in found.suspects]


@both_configurations
def test_running_statistics_that_no_longer_run_are_named(tmp_path, collect):
    kept = {}

    def stop(model, stepper, step):
        if step >= 62:
            mean = model.get_buffer("stem.1.running_mean")
            mean.copy_(kept.setdefault("mean", mean.clone()))

    found = train(tmp_path, "resnet", collect=collect, harm=stop)
    assert ("stem.1.running_mean", "buffer") in [(i.name, i.quantity) for i in found]


@both_families
@pytest.mark.parametrize("optimizer", ["adamw", "dampened"])
def test_a_moment_of_another_step_is_named_where_its_mean_is_right(tmp_path, family, optimizer):
    name = FAMILIES[family][2]
    key = "exp_avg" if optimizer == "adamw" else "momentum_buffer"

    def grow(model, stepper, step):
        if step == FAULT:
            moment = stepper.state[model.get_parameter(name)][key]
            moment.add_(0.05 * (moment - moment.mean()))

    [found, *_] = train(tmp_path, family, optimizer, "everything", grow)
    assert (found.name, found.quantity, found.step) == (name, key, FAULT)
    assert "the angle between them" in found.summary


@both_families
@both_configurations
def test_an_update_that_the_optimizer_does_not_say_is_named(tmp_path, family, collect, monkeypatch):
    name, step_of = FAMILIES[family][3], 10 * math.ceil(FAULT / 10)
    module = sys.modules[torch.optim.SGD.__module__]
    right, updates, weights = module.sgd, itertools.count(), []

    def wrong(params, *args, **kwargs):
        before = params[weights[0]].detach().clone()
        right(params, *args, **kwargs)
        if next(updates) == step_of:
            params[weights[0]].lerp_(before, 0.5)

    def note(model, stepper, step):
        weights[:] = [[n for n, _ in model.named_parameters()].index(name)]

    monkeypatch.setattr(module, "sgd", wrong)
    [found, *_] = train(tmp_path, family, "nesterov", collect, note)
    assert (found.name, found.quantity, found.step) == (name, "update", step_of)


@both_families
@both_configurations
@pytest.mark.parametrize("optimizer", ["adamw", "nesterov"])
def test_a_weight_that_no_update_can_have_moved_so_far_is_named(tmp_path, family, collect, optimizer):
    name = FAMILIES[family][2]

    def noise(model, stepper, step):
        if step == FAULT:
            weight = model.get_parameter(name)
            with torch.no_grad():
                weight.add_(torch.randn_like(weight) * weight.std() * 2)

    [found, *_] = train(tmp_path, family, optimizer, collect, noise)
    assert (found.name, found.quantity) == (name, "parameter")


@both_families
def test_a_gradient_whose_sign_turns_is_named(tmp_path, family):
    name = FAMILIES[family][3]

    def turn(model, stepper, step):
        for other, parameter in model.named_parameters():
            # Gradients that agree with their momentum, as in large batches.
            moment = stepper.state[parameter].get("exp_avg", parameter.grad)
            parameter.grad.add_(moment * (parameter.grad.norm() / moment.norm().clamp(min=1e-12)))
            parameter.grad.mul_(-1.0 if other == name and step >= FAULT else 1.0)

    train(tmp_path, family, "adamw", "everything", turn)
    lines = [json.loads(line) for line in (tmp_path / "rank0" / "anomalies.jsonl").read_text().splitlines()]
    assert (FAULT, name, "gradient", False) in [
        (line["step"], line["name"], line["quantity"], line["alarm"])
        for line in lines
        if line["detector"] == "direction"
    ]


@both_families
@both_configurations
def test_gradients_that_are_not_divided_are_told_of_together(tmp_path, family, collect):
    kept = {}

    def undivided(model, stepper, step):
        for name, parameter in model.named_parameters():
            # Averaged over some batches, as in large ones.
            kept[name] = 0.8 * kept.get(name, parameter.grad) + 0.2 * parameter.grad
            parameter.grad.copy_(kept[name] * (4.0 if step >= FAULT else 1.0))

    [found, *_] = train(tmp_path, family, "climbs", collect, undivided)
    assert (found.name, found.quantity, found.step, found.kind) == ("all", "gradient", FAULT, "shift")


@both_families
@both_configurations
def test_a_loss_above_its_start_is_told_at_once(tmp_path, family, collect):
    def shifted(step, given):
        inputs, labels = given
        return (inputs, (labels + 16) % 32 if family == "gpt" else (labels + 1) % 4) if step >= FAULT else given

    [found, *_] = train(tmp_path, family, "learns fast", collect, batch=shifted, steps=FAULT + 20)
    assert found.step == FAULT
    assert found.severity != "note"


@both_families
@both_configurations
def test_a_weight_that_never_trains_is_named_after_ten_steps(tmp_path, family, collect):
    name = FAMILIES[family][3]

    def freeze(model, stepper, step):
        weight = model.get_parameter(name).requires_grad_(False)
        weight.grad = None

    [found, *_] = train(tmp_path, family, collect=collect, harm=freeze, steps=20)
    assert (found.name, found.quantity) == (name, "update")
    assert found.step <= 11


@both_families
@both_configurations
def test_the_rows_of_a_bad_batch_are_named_and_dumped(tmp_path, family, collect):
    rows = [3, 4, 6] if family == "gpt" else [3]

    def spoilt(step, given):
        inputs, labels = given
        if step == FAULT:
            inputs, labels = inputs.clone(), labels.clone()
            inputs[rows] = 31 if family == "gpt" else inputs[rows] * 1e4
            labels.view(inputs.shape[0], -1)[rows] = 16 if family == "gpt" else 0
        return inputs, labels

    [found, *_] = train(tmp_path, family, "learns fast", collect, batch=spoilt, steps=FAULT + 8, dump=True)
    assert (found.name, found.quantity, found.step) == ("input.0", "data", FAULT)
    assert ("rows 3, 4 and 6 of 8" if family == "gpt" else "row 3 of 16") in found.summary
    dumped = (tmp_path / "dump" / f"step{FAULT}" / "rank0" / "dump_tensor_data").glob("Module.*.forward.0.input.0.pt")
    for path in dumped if collect == "everything" else [next(dumped)]:  # which may have been examined just before
        row = torch.load(path, weights_only=True)[3]
        assert (row == 31).all() if family == "gpt" else row.abs().max() > 1e4


class Lamb(torch.optim.AdamW):
    """Moves each weight by a share of its own norm, whatever the gradient is (You et al., 2020)."""

    @torch.no_grad()
    def step(self, closure=None):
        before = [p.clone() for group in self.param_groups for p in group["params"]]
        super().step(closure)
        for group in self.param_groups:
            for p, old in zip(group["params"], before, strict=True):
                moved = p - old
                p.copy_(old + moved * (5 * group["lr"] * old.norm().clamp(min=0.1) / moved.norm().clamp(min=1e-9)))


def two_optimizers(model):
    """Return one optimizer for the matrices and one for the rest, and what a loop's scaler lets them do."""
    parameters = list(model.parameters())
    matrices, rest = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() < 2]
    return [torch.optim.AdamW(matrices, lr=2e-3), torch.optim.SGD(rest, lr=0.01, momentum=0.9)]


LOOPS = {
    "two optimizers, one of them skipped by a scaler now and then": (two_optimizers, {"scaled": True}),
    "two updates in a step": (lambda m: [torch.optim.AdamW(m.parameters(), lr=1e-3)], {"updates": 2}),
    "two updates of SGD in a step": (
        lambda m: [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9)],
        {"updates": 2},
    ),
    "a share of each weight's norm": (lambda m: [Lamb(m.parameters(), lr=2e-3)], {}),
    "a loss below zero": (lambda m: [torch.optim.AdamW(m.parameters(), lr=1e-3)], {"less": 9.0}),
    "a loss that crosses zero": (lambda m: [torch.optim.AdamW(m.parameters(), lr=1e-3)], {"less": 2.5}),
}
if hasattr(torch.optim, "Muon"):
    LOOPS["orthogonal updates"] = (
        lambda m: [
            torch.optim.Muon([p for p in m.parameters() if p.dim() == 2], lr=5e-3),
            torch.optim.AdamW([p for p in m.parameters() if p.dim() != 2], lr=2e-3),
        ],
        {},
    )


@both_families
@pytest.mark.parametrize("loop", LOOPS)
def test_loops_of_other_shapes_are_quiet(tmp_path, family, loop):
    make_optimizers, how = LOOPS[loop]
    make, data, *_ = FAMILIES[family]
    torch.manual_seed(0)
    model = make()
    optimizers = make_optimizers(model)
    scaled = how.get("scaled", False)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5, enabled=scaled)
    config = {
        "output_dir": str(tmp_path),
        "collect": CONFIGURATIONS["everything"],
        "statistics": STATISTICS["everything"],
        "on_incident": False,
        "strict": True,
    }
    generator, skipped = torch.Generator().manual_seed(1), 0
    with trainsentry.TrainMonitor(config).watch(model, optimizers) as monitor:
        for step in range(80):
            inputs, targets = data(generator)
            loss = nn.functional.cross_entropy(model(inputs).flatten(0, -2), targets) - how.get("less", 0.0)
            scaler.scale(loss).backward()
            if scaled and step % 9 == 5:
                model.head.bias.grad[0] = math.inf  # as a scale that is too large makes it
            monitor.log(loss=loss)
            for _ in range(how.get("updates", 1)):
                for optimizer in optimizers:
                    scaler.step(optimizer)
            before = scaler.get_scale()
            scaler.update()
            skipped += scaler.get_scale() < before
            for optimizer in optimizers:
                optimizer.zero_grad()
        monitor.flush()
        assert [i.summary for i in monitor.incidents if i.severity != "note"] == []
    assert bool(skipped) == scaled
