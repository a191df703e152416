"""What must hold in any training is checked in real ones: a breach is named, and none is seen where there is none."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from two_families import CONFIGURATIONS, FAMILIES, FAULT, STATISTICS, train

import trainsentry

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "detection"))
import clean_runs

both_families = pytest.mark.parametrize("family", FAMILIES)
both_configurations = pytest.mark.parametrize("collect", CONFIGURATIONS)


@both_families
@both_configurations
def test_a_loader_that_is_stuck_is_named(tmp_path, family, collect):
    kept = {}

    def stuck(step, given):
        return kept.setdefault("batch", given) if step >= FAULT else given

    [found, *_] = train(tmp_path, family, collect=collect, batch=stuck)
    assert (found.quantity, found.name, found.step) == ("data", "input.0", FAULT + 1)
    assert "the same batch after batch" in found.summary


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
@pytest.mark.parametrize(("family", "name"), [("gpt", "mask"), ("resnet", "stem.1.running_var")])
def test_a_buffer_with_a_nan_is_named(tmp_path, family, collect, name):
    """No training pass reads the variance, and every pass of a decoder reads its mask."""

    def spoil(model, stepper, step):
        if step == FAULT:
            model.get_buffer(name).view(-1)[1] = math.nan

    [found, *_] = train(tmp_path, family, collect=collect, harm=spoil, steps=FAULT + 12)
    assert (found.kind, found.severity) == ("nonfinite", "critical")
    assert (found.name, found.quantity) == (name, "buffer")


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


WRONG = {"gpt": "blocks.1.linear1", "resnet": "body.0"}


@both_families
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_a_module_that_computes_wrongly_is_named(tmp_path, family, way):
    make, data, *_ = FAMILIES[family]
    torch.manual_seed(0)
    model, now = make(), [0]

    def wrong_gradient(used, arrived):
        wrong = [None if x is None else torch.cat([1.001 * x[:1], x[1:]]) for x in used]
        return tuple(wrong) if now[0] >= FAULT else None

    def wrong(module, args, output):
        if way == "backward":
            node = output.grad_fn
            while "View" in node.name():
                node = node.next_functions[0][0]
            node.register_hook(wrong_gradient)
            return output
        return output.clone().index_fill_(1, torch.tensor([3]), 0.0) if now[0] >= FAULT else output

    model.get_submodule(WRONG[family]).register_forward_hook(wrong)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    config = {"output_dir": str(tmp_path), "strict": True, "on_incident": False}
    config["collect"] = {"activations": {"every": 1, "recompute": True}}
    generator = torch.Generator().manual_seed(1)
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        for now[0] in range(FAULT + 40):
            inputs, targets = data(generator)
            nn.functional.cross_entropy(model(inputs).flatten(0, -2), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        monitor.flush()
        found = monitor.incidents
    lines = [json.loads(line) for line in (tmp_path / "rank0" / "anomalies.jsonl").read_text().splitlines()]
    wrong_calls = [(each["name"], each["step"]) for each in lines if each["kind"] == "arithmetic"]
    assert wrong_calls
    side = "output" if way == "forward" else "input"
    assert {name for name, _ in wrong_calls} == {f"{WRONG[family]}.{side}.0"}
    assert FAULT <= min(step for _, step in wrong_calls) < FAULT + 40
    assert found


@pytest.mark.parametrize(
    ("number", "task"), list(enumerate(clean_runs.TASKS)), ids=lambda x: getattr(x, "__name__", "")
)
def test_every_invariant_is_quiet_in_the_clean_runs(number, task):
    """Fewer steps than the benchmark's, of which each task has one optimizer and schedule in turn."""
    plan = list(clean_runs.PLANS)[number % len(clean_runs.PLANS)]
    assert clean_runs.run((task.__name__, plan, "everything", 101, 45))[1] == []
