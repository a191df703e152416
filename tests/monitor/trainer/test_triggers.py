"""What an incident sets off: dumps of the right step, dense sampling, overflow counting, stops."""

import json

import pandas as pd
import pytest
import torch
from tiny_models import mlp, read_json_lines, train

import trainsentry
from trainsentry import OverflowLimitReached, TrainingStopped
from trainsentry.collectors.torch.saving import load_tensor

SEEN = 10  # a step at which weights are sampled by default
FLIP = 13  # and one at which they are not


def make(out, **config):
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    settings = {"output_dir": str(out), "strict": True, **config}
    return model, optimizer, trainsentry.TrainMonitor(settings).watch(model, optimizer)


def break_weight(model, value=float("nan"), at=FLIP):
    def before_step(step):
        if step == at:
            with torch.no_grad():
                model[2].weight[1, 2] = value

    return before_step


def dump_of(out, step):
    directory = out / "dump" / f"step{step}" / "rank0"
    data = json.loads((directory / "dump.json").read_text())
    return data, {path.name: load_tensor(path) for path in (directory / "dump_tensor_data").iterdir()}


def test_same_step_dumps_the_step_itself_before_the_update(out):
    model, optimizer, monitor = make(out, collect={"activations": False})
    held = {}

    def keep(*_):
        held.update(weight=model[2].weight.detach().clone(), gradient=model[0].weight.grad.clone())
        held.update(exp_avg=optimizer.state[model[2].weight]["exp_avg"].clone())

    with monitor:
        train(model, optimizer, FLIP, monitor)
        handle = optimizer.register_step_pre_hook(keep)
        break_weight(model)(FLIP)
        train(model, optimizer, 1, monitor, seed=9)
        handle.remove()
        train(model, optimizer, 2, monitor)
        monitor.flush()
        [incident] = monitor.incidents
    assert (incident.name, incident.quantity, incident.step) == ("2.weight", "parameter", FLIP)
    data, tensors = dump_of(out, FLIP)
    assert (data["step"], data["moment"], data["task"], data["framework"]) == (
        FLIP,
        "before_update",
        "tensor",
        "pytorch",
    )
    stem = "Module.2.Linear"
    assert torch.equal(tensors[f"{stem}.forward.0.parameters.weight.pt"], held["weight"]) or torch.equal(
        tensors[f"{stem}.forward.0.parameters.weight.pt"].nan_to_num(7.0), held["weight"].nan_to_num(7.0)
    )
    assert torch.equal(
        tensors["Module.0.Linear.parameters_grad.0.weight.pt"].nan_to_num(7.0), held["gradient"].nan_to_num(7.0)
    )
    assert torch.equal(tensors[f"{stem}.optimizer_state.0.weight.exp_avg.pt"], held["exp_avg"])
    described = data["data"][f"{stem}.forward.0"]["parameters"]["weight"]
    assert described["data_name"] == f"{stem}.forward.0.parameters.weight.pt"
    assert described["type"] == "torch.Tensor"
    assert f"dump: dump/step{FLIP}/rank0" in " ".join(incident.actions)


def test_the_step_behind_it_is_dumped_whole_with_activations_and_their_gradients(out):
    model, optimizer, monitor = make(out)
    with monitor:
        train(model, optimizer, FLIP + 3, monitor, before_step=break_weight(model))
    data, tensors = dump_of(out, FLIP + 1)
    assert data["step"] == FLIP + 1
    for name in ("forward.0.input.0", "forward.0.output.0", "backward.0.input.0", "forward.0.parameters.weight"):
        assert f"Module.2.Linear.{name}.pt" in tensors
    assert data["data"]["Module.2.Linear.forward.0"]["input_args"][0]["shape"] == [16, 16]
    directory = out / "dump" / f"step{FLIP + 1}" / "rank0"
    stacks = json.loads((directory / "stack.json").read_text())
    assert any("tiny_models.py" in line for _, lines in stacks.values() for line in lines)
    parents = json.loads((directory / "construct.json").read_text())
    assert parents["Module.2.Linear.forward.0"] is None  # the root is no suspect


def test_without_same_step_a_later_step_is_dumped_and_says_so(out):
    model, optimizer, monitor = make(out, on_incident={"dump": {"same_step": False}})
    with monitor:

        def before_step(step):
            monitor.flush()  # the recorder's word arrives at the next boundary
            break_weight(model)(step)

        train(model, optimizer, FLIP + 6, monitor, before_step=before_step)
    [directory] = (out / "dump").iterdir()
    step = int(directory.name.removeprefix("step"))
    assert FLIP < step <= FLIP + 3
    assert dump_of(out, step)[0]["step"] == step


def test_the_budget_keeps_the_first_suspect_and_names_what_was_left_out(out):
    model, optimizer, monitor = make(out, on_incident={"dump": {"max_bytes": 300}})
    with monitor:
        train(model, optimizer, FLIP + 2, monitor, before_step=break_weight(model))
    data, tensors = dump_of(out, FLIP)
    assert "Module.2.Linear.forward.0.parameters.weight.pt" in tensors
    assert sum(t.numel() * t.element_size() for t in tensors.values()) <= 300
    assert data["left_out"]


def test_the_cool_down_separates_dumps(out):
    model, optimizer, monitor = make(out, on_incident={"dump": {"cooldown_steps": 60}, "sample_every_step_for": 0})
    with monitor:

        def before_step(step):
            monitor.flush()  # so that what the recorder says does not depend on who is faster
            bad = step in {13, 45, 90}
            with torch.no_grad():
                model[2].weight[1, 2] = float("nan") if bad else 0.1
                if step in {14, 46, 91}:
                    for p in model.parameters():
                        p.nan_to_num_(0.1)
                    for state in optimizer.state.values():
                        state["exp_avg"].nan_to_num_(0.0)
                        state["exp_avg_sq"].nan_to_num_(1e-4)

        train(model, optimizer, 95, monitor, before_step=before_step)
        monitor.flush()
        assert len(monitor.incidents) == 3
    dumped = sorted(int(p.name.removeprefix("step")) for p in (out / "dump").iterdir())
    assert {13, 90} <= set(dumped)
    assert not [step for step in dumped if 40 <= step < 80]


def test_dump_false_writes_none(out):
    model, optimizer, monitor = make(out, on_incident={"dump": False})
    with monitor:
        train(model, optimizer, FLIP + 3, monitor, before_step=break_weight(model))
    assert not (out / "dump").exists()


def test_an_incident_switches_to_dense_sampling_for_n_steps(out):
    model, optimizer, monitor = make(out, on_incident={"sample_every_step_for": 4, "dump": False})
    with monitor:
        train(model, optimizer, 30, monitor, before_step=break_weight(model, value=1e30))
    steps = set(pd.read_csv(out / "rank0" / "update_0-999.csv")["step"])
    assert steps == {0, 10, 14, 15, 16, 17, 20}
    # The step itself was examined out of turn.
    assert FLIP in set(pd.read_csv(out / "rank0" / "parameter_0-999.csv")["step"])


@pytest.mark.parametrize("same_step", [True, False])
def test_overflow_nums_stops_at_the_nth_step_with_an_overflow(out, same_step):
    config = {"overflow_check": {"overflow_nums": 3}, "on_incident": {"dump": {"same_step": same_step}}}
    model, optimizer, monitor = make(out, **config)
    weights = {}
    optimizer.register_step_pre_hook(lambda *_: weights.update(before=model[0].bias.detach().clone()))
    with monitor, pytest.raises(OverflowLimitReached) as stopped:
        train(model, optimizer, 40, monitor, before_step=break_weight(model))
    assert stopped.value.step == FLIP + 2
    assert torch.equal(model[0].bias, weights["before"]) == same_step or model[0].bias.isnan().any()
    assert isinstance(stopped.value, TrainingStopped)
    lines = read_json_lines(out / "rank0" / "overflow.jsonl")
    assert [(line["step"], line["count"]) for line in lines] == [(FLIP, 1), (FLIP + 1, 2), (FLIP + 2, 3)]
    assert ["gradient", "2.weight", 0] in lines[0]["names"]


def test_minus_one_counts_to_the_end(out):
    model, optimizer, monitor = make(out)
    with monitor:
        train(model, optimizer, FLIP + 5, monitor, before_step=break_weight(model))
    assert json.loads((out / "rank0" / "status.json").read_text())["overflow_steps"] == 5


def test_overflow_check_off_is_started_by_an_incident_or_stays_off(out, tmp_path):
    for name, on_incident in (("started", True), ("off", False)):
        config = {"overflow_check": False, "on_incident": {"overflow_check": on_incident, "dump": False}}
        model, optimizer, monitor = make(out / name, **config)
        with monitor:
            train(model, optimizer, FLIP + 3, monitor, before_step=break_weight(model))
        assert (out / name / "rank0" / "overflow.jsonl").exists() == on_incident


def test_an_incident_stops_before_the_update_when_asked_to(out):
    model, optimizer, monitor = make(out, on_incident={"stop": True})
    with monitor:
        with pytest.raises(TrainingStopped) as stopped:
            train(model, optimizer, 40, monitor, before_step=break_weight(model))
        assert stopped.value.step == FLIP
        assert stopped.value.incident.name == "2.weight"
        assert model[0].weight.isfinite().all()  # the update that would have spread it did not happen
    assert (out / "dump" / f"step{FLIP}" / "rank0" / "dump.json").exists()


def test_a_soft_incident_is_dumped_before_the_stop(out):
    collect = {"parameters": {"every": 1}}
    model, optimizer, monitor = make(out, on_incident={"stop": True}, collect=collect)

    def before_step(step):
        monitor.flush()
        if step == FLIP:
            model[2].weight.detach()[1, 2] = 6.0  # 25 times the largest, and finite: no hard rule fires

    with monitor, pytest.raises(TrainingStopped) as stopped:
        train(model, optimizer, 60, monitor, before_step=before_step)
    assert stopped.value.incident.name == "2.weight"
    data, tensors = dump_of(out, stopped.value.step)
    assert "Module.2.Linear.forward.0.output.0.pt" in tensors
    assert data["step"] == stopped.value.step


def test_a_nan_in_the_data_names_the_data(out):
    model, optimizer, monitor = make(out, collect={"activations": {"every": 1}})
    with monitor:
        train(model, optimizer, FLIP, monitor)
        optimizer.zero_grad()
        x = torch.ones(4, 8)
        x[1, 1] = float("nan")
        model(x).sum().backward()
        optimizer.step()
        monitor.flush()
        [incident] = monitor.incidents
    assert (incident.name, incident.quantity) == ("input.0", "data")


def test_a_nan_made_by_a_module_names_the_module(out):
    model, optimizer, monitor = make(out, collect={"activations": {"every": 1}})
    handle = None

    def before_step(step):
        nonlocal handle
        if step == FLIP:
            handle = model[1].register_forward_hook(lambda m, a, o: torch.where(o > 1.0, float("nan"), o), prepend=True)

    with monitor:
        train(model, optimizer, FLIP + 1, monitor, before_step=before_step)
        monitor.flush()
        [incident] = monitor.incidents
    assert (incident.name, incident.quantity, incident.step) == ("1.output.0", "activation_output", FLIP)
    assert [s.name for s in incident.suspects][:3] == ["1.output.0", "2.output.0", "output.0"]


def test_a_suspicion_is_looked_into_at_the_next_step_and_costs_no_more_than_usual_sampling(out):
    model, optimizer, monitor = make(out, collect={"activations": False})
    sampled = []
    with monitor:
        for step in range(40):
            train(model, optimizer, 1, seed=step)
            monitor.log(loss=2.0 if step == 31 else 1.0)  # twice the usual, once: too little for an incident
            monitor.flush()
        assert monitor.incidents == ()
        table = monitor.records()
        sampled = sorted(set(table[table["quantity"] == "parameter"]["step"]))
    assert sampled[:4] == [0, 10, 20, 30]
    assert len(sampled) == 5
    assert sampled[4] in {33, 34}


@pytest.mark.parametrize("at", [20, 23])
@pytest.mark.parametrize("same_step", [True, False])
def test_a_frozen_weight_that_breaks_is_named(out, at, same_step):
    torch.manual_seed(0)
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[2].parameters(), lr=1e-3)
    config = {"output_dir": str(out), "strict": True, "on_incident": {"dump": {"same_step": same_step}}}
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:

        def before_step(step):
            monitor.flush()
            if step == at:
                model[0].weight.detach()[0, 0] = float("nan")

        train(model, optimizer, at + 6, monitor, before_step=before_step)
        monitor.flush()
        assert [(i.name, i.quantity) for i in monitor.incidents] == [("0.weight", "parameter")]


@pytest.mark.parametrize("at", [20, 23])
def test_the_weight_of_an_optimizer_that_steps_later_is_named(out, at):
    torch.manual_seed(0)
    model = mlp()
    head, body = (torch.optim.AdamW(model[i].parameters(), lr=1e-3) for i in (2, 0))
    config = {"output_dir": str(out), "strict": True, "on_incident": {"stop": True}}
    monitor = trainsentry.TrainMonitor(config).watch(model, [head, body])

    def train_both():
        for step in range(at + 5):
            if step == at:
                model[0].weight.detach()[0, 0] = float("nan")
            for optimizer in (head, body):
                optimizer.zero_grad()
            loss = model(torch.randn(16, 8)).pow(2).mean()
            loss.backward()
            monitor.log(loss=loss)
            for optimizer in (head, body):
                optimizer.step()

    with monitor:
        with pytest.raises(TrainingStopped) as stopped:
            train_both()
        assert (stopped.value.incident.name, stopped.value.step) == ("0.weight", at)


def test_after_a_rollback_a_new_fault_is_a_new_incident_with_its_dump_in_new_files(out):
    model, optimizer, monitor = make(out)
    with monitor:
        train(model, optimizer, 20, monitor)
        state, weights = monitor.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
        train(model, optimizer, 15, monitor, before_step=break_weight(model, at=5))
        monitor.flush()
        model.load_state_dict(weights)
        for held in optimizer.state.values():
            held["exp_avg"].zero_(), held["exp_avg_sq"].fill_(1e-4)
        monitor.load_state_dict(state)

        def before_step(step):
            if step == 7:
                model[0].weight.detach()[0, 0] = float("nan")

        train(model, optimizer, 10, monitor, before_step=before_step)
        monitor.flush()
        found = {i.id: (i.name, i.first_seen) for i in monitor.incidents}
    assert found == {1: ("2.weight", 25), 2: ("0.weight", 27)}
    assert {"step25", "step27"} <= {p.name for p in (out / "dump").iterdir()}
    assert set(pd.read_csv(out / "rank0" / "gradient_20-999.r1.csv")["step"]) == set(range(20, 30))


class Noisy(torch.nn.Module):
    """Batch norm, dropout and, when `bad`, an operation whose results are never the same."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(16)
        self.first = torch.nn.Linear(16, 16)
        self.last = torch.nn.Linear(16, 16)
        self.calls = 0
        self.bad = False

    def forward(self, x):
        self.calls += 1
        x = torch.nn.functional.dropout(self.norm(self.first(x)), 0.5)
        return self.last(x * (1 + self.calls * 1e-3) if self.bad else x)


def replayed(out, *, bad, replay=True):
    """Train with a weight that becomes NaN; return the state after it, the incident's actions and the output folder."""
    torch.manual_seed(0)
    model = Noisy()
    model.bad = bad
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    config = {"output_dir": str(out), "strict": True, "on_incident": {"dump": {"replay": replay}}}
    monitor = trainsentry.TrainMonitor(config).watch(model, optimizer)

    def before_step(step):
        if step == FLIP:
            with torch.no_grad():
                model.last.weight[1, 2] = float("nan")

    with monitor:
        generator = torch.Generator().manual_seed(1)
        for step in range(FLIP + 3):
            before_step(step)
            model(torch.randn(8, 16, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        monitor.flush()
        actions = [a for i in monitor.incidents for a in i.actions]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return state, torch.get_rng_state(), [a for a in actions if a.startswith("replay")]


@pytest.mark.parametrize("bad", [False, True])
def test_a_replay_tells_data_from_device_and_leaves_everything_as_it_was(out, tmp_path, bad):
    state, rng, [action] = replayed(out, bad=bad)
    plain, plain_rng, none = replayed(tmp_path / "plain", bad=False, replay=False)
    assert none == []
    assert torch.equal(rng, plain_rng)
    if not bad:
        assert all(torch.equal(state[n].nan_to_num(7), plain[n].nan_to_num(7)) for n in plain)
        assert "equal to the bit: it comes of data or numerics, not of the device" in action
    else:
        assert "part at" in action
        assert "the device, or an operation that is not deterministic" in action
    for i in range(2):
        folder = out / "dump" / f"step{FLIP}" / "rank0" / f"replay{i}"
        data = json.loads((folder / "dump.json").read_text())["data"]
        assert "Module.last.Linear.forward.0" in data
        assert data["Module.last.Linear.forward.0"]["output"][0]["md5"]


def test_inputs_that_were_changed_since_are_not_replayed(out):
    model, optimizer, monitor = make(out, on_incident={"dump": {"replay": True}})
    x = torch.randn(4, 8)
    with monitor:
        for step in range(FLIP + 2):
            break_weight(model)(step)
            model(x).square().mean().backward()
            x.add_(0.1)
            optimizer.step()
            optimizer.zero_grad()
        monitor.flush()
        actions = [a for i in monitor.incidents for a in i.actions]
    assert "replay: not done: its inputs were changed in place since" in actions


def test_an_incident_of_nan_starts_an_overflow_check_of_the_next_step(out):
    model, optimizer, monitor = make(out)
    with monitor:
        train(model, optimizer, FLIP + 3, monitor, before_step=break_weight(model))
        monitor.flush()
        actions = [a for i in monitor.incidents for a in i.actions]
    [action] = [a for a in actions if a.startswith("overflow check")]
    assert action.startswith(f"overflow check: overflow/step{FLIP + 1}/rank0 (")
    directory = out / "overflow" / f"step{FLIP + 1}" / "rank0"
    data = json.loads((directory / "dump.json").read_text())["data"]
    first = next(iter(data))
    assert data[first]["overflow"] in {"made", "passed_on"}
    assert first in action
    assert not (directory / "dump_tensor_data").exists()


def test_without_overflow_check_there_is_none(out):
    model, optimizer, monitor = make(out, on_incident={"overflow_check": False})
    with monitor:
        train(model, optimizer, FLIP + 3, monitor, before_step=break_weight(model))
    assert not (out / "overflow").exists()
