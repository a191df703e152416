"""Only overflowing calls are written, as made here or passed on, and training stops at the limit."""

import json

import pytest
import torch
from debugged import Tower, make, read
from torch import nn
from typer.testing import CliRunner

from trainsentry import OverflowLimitReached, PrecisionDebugger
from trainsentry.collectors.torch.calls import debugging
from trainsentry.collectors.torch.calls.overflow_task import nonfinite
from trainsentry.collectors.torch.saving import load_tensor
from trainsentry.monitor.cli.app import app


def check(tmp_path, body, nums=-1, level="L1", model=None):
    path = tmp_path / "config.json"
    settings = {"task": "overflow_check", "level": level, "overflow_check": {"overflow_nums": nums}}
    path.write_text(json.dumps({"dump_path": str(tmp_path / "dump"), **settings}))
    debugger = PrecisionDebugger(str(path))
    debugger.start(model)
    body()
    debugger.stop()
    debugger.step()
    assert debugger._session.guard.failures == {}
    return read(tmp_path / "dump" / "step0" / "rank0")["dump"]["data"]


def test_weights_that_are_not_finite_are_told_of_first(tmp_path, caplog):
    model = Tower()
    weight = next(model.parameters())
    with torch.no_grad():
        weight.view(-1)[0] = torch.nan
    check(tmp_path, lambda: model(torch.ones(2, *weight.shape[1:])), level="mix", model=model)
    [name] = [name for name, p in model.named_parameters() if p is weight]
    assert f"step 0 begins with NaN or Inf in {name}; calls that overflow pass it on" in caplog.text


def test_weights_are_looked_at_where_no_step_before_was_checked(tmp_path, monkeypatch):
    looked, told = [], nonfinite([("w", torch.full((1,), torch.nan))])
    monkeypatch.setattr(debugging, "nonfinite", lambda weights: looked.append(debugger._session.iteration) or told)
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({"dump_path": str(tmp_path), "task": "overflow_check", "level": "mix", "step": [1, 2, 5]})
    )
    debugger, model = PrecisionDebugger(str(path)), make(Tower)
    for _ in range(7):
        debugger.start(model)
        model(torch.ones(6, 4))
        debugger.stop()
        debugger.step()
    assert looked == [1, 5]


def test_what_made_it_is_told_from_what_passed_it_on(tmp_path):
    def body():
        x = torch.full((2,), 60000.0, dtype=torch.float16)
        y = x * 2
        torch.exp(y)
        torch.tanh(y)
        x * 0.5

    data = check(tmp_path, body)
    assert {name: entry["overflow"] for name, entry in data.items()} == {
        "Tensor.__mul__.0.forward": "made",
        "Torch.exp.0.forward": "passed_on",
    }


def test_inputs_are_kept_as_they_were_before_the_call_changed_them(tmp_path):
    def body():
        x = torch.full((2,), 60000.0, dtype=torch.float16)
        x.mul_(2)

    data = check(tmp_path, body)
    [facts] = [v for v in data["Tensor.mul_.0.forward"]["input_args"] if "dtype" in v]
    folder = tmp_path / "dump" / "step0" / "rank0" / "dump_tensor_data"
    assert load_tensor(folder / facts["data_name"]).tolist() == [60000.0, 60000.0]
    assert torch.isinf(load_tensor(folder / "Tensor.mul_.0.forward.output.0.pt")).all()


def test_masks_of_minus_infinity_are_no_overflow(tmp_path):
    def body():
        scores = torch.zeros(2, 2).masked_fill(torch.eye(2, dtype=torch.bool), -torch.inf)
        torch.softmax(scores + 0.5, -1)

    assert check(tmp_path, body, nums=1) == {}


@pytest.mark.parametrize("level", ["L0", "mix"])
def test_modules_and_backward_passes_are_checked(tmp_path, level):
    model = make(Tower)

    def body():
        loss = model(torch.ones(2, 4)).sum()
        (loss * torch.tensor(3e38)).mul(10).backward() if level == "mix" else (loss * torch.inf).backward()

    names = set(check(tmp_path, body, level=level, model=model))
    assert "Module.last.Linear.backward.0" in names
    assert not any(n.endswith("forward.0") and n.startswith("Module.") for n in names)


def test_training_stops_at_the_call_that_reaches_the_limit(tmp_path):
    def overflow(times):
        for _ in range(times):
            torch.full((1,), 3e38) * 10

    debugger = PrecisionDebugger(task="overflow_check", dump_path=str(tmp_path))
    debugger._session.overflows.limit = 4
    for step, times in enumerate((0, 2, 0)):
        debugger.start()
        overflow(times)
        debugger.stop()
        debugger.step()
        assert debugger._session.iteration == step + 1
    debugger.start()
    message = r"step 3: 4 overflowing calls .* overflow_nums is 4; the first on this rank: Tensor.__mul__.0.forward"
    with pytest.raises(OverflowLimitReached, match=message) as e:
        overflow(9)
    assert e.value.step == 3
    debugger.close()
    written = read(tmp_path / "step3" / "rank0")["dump"]["data"]
    assert list(written) == ["Tensor.__mul__.0.forward", "Tensor.__mul__.1.forward"]


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_a_backward_pass_that_overflows_stops_too(tmp_path, level):
    debugger = PrecisionDebugger(task="overflow_check", level=level, dump_path=str(tmp_path))
    model = make(Tower)
    debugger.start(model)
    loss = model(torch.ones(2, 4))
    debugger.stop()
    with pytest.raises(OverflowLimitReached, match=r"backward"):
        loss.backward(torch.full((2, 1), torch.inf))
    debugger.close()


def test_a_step_that_the_loss_scaler_left_out_is_counted_apart(tmp_path):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    debugger = PrecisionDebugger(task="overflow_check", level="L1", dump_path=str(tmp_path))
    before = model.weight.detach().clone()
    for _ in range(2):
        debugger.start(model)
        scaler.scale(model(torch.full((2, 2), 100.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        debugger.stop()
        debugger.step()
    assert torch.equal(model.weight, before)
    overflows = debugger._session.overflows
    assert (overflows.calls, overflows.skipped_steps) == (0, 2)


class Flag:
    """A device in saturation mode, which clips results and sets a flag; the test sets the flag."""

    def __init__(self):
        self.raised = True  # left over from before
        self.bad = False

    def clear(self):
        self.raised = False

    def is_set(self):
        return self.raised or self.bad

    def restore(self):
        self.raised = True


def test_in_saturation_mode_the_flag_is_cleared_before_each_call(tmp_path, monkeypatch):
    flag = Flag()
    monkeypatch.setattr(debugging, "DeviceOverflowFlags", lambda: flag)

    def body():
        x = torch.ones(2)
        x + 1
        flag.bad = True
        x * 2
        flag.bad = False
        x - 1

    data = check(tmp_path, body)
    assert {name: entry["overflow"] for name, entry in data.items()} == {"Tensor.__mul__.0.forward": "made"}


class Raises(torch.autograd.Function):
    """Sets the flag in its forward or its backward pass, whose values stay finite."""

    @staticmethod
    def forward(ctx, x, flag, forward, backward):
        ctx.flag, ctx.backward = flag, backward
        flag.raised |= forward
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        ctx.flag.raised |= ctx.backward
        return gradient * 2, None, None, None


class RaisesInside(nn.Module):
    """A module whose flag is set between two modules inside it."""

    def __init__(self, flag, forward, backward):
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)
        self.arguments = flag, forward, backward

    def forward(self, x):
        return self.last(Raises.apply(self.first(x), *self.arguments))


@pytest.mark.parametrize(
    ("forward", "backward", "found"),
    [
        (True, False, {"Module.middle.RaisesInside.forward.0"}),
        (False, True, {"Module.middle.RaisesInside.backward.0"}),
        (False, False, set()),
    ],
)
def test_a_module_is_blamed_for_the_flag_of_what_runs_between_the_modules_inside_it(
    tmp_path, monkeypatch, forward, backward, found
):
    flag = Flag()
    monkeypatch.setattr(debugging, "DeviceOverflowFlags", lambda: flag)
    model = nn.Sequential()
    for name, part in (("before", nn.Linear(2, 2)), ("middle", RaisesInside(flag, forward, backward))):
        model.add_module(name, part)
    model.add_module("after", nn.Linear(2, 2))
    data = check(tmp_path, lambda: model(torch.ones(3, 2)).sum().backward(), level="L0", model=model)
    assert {name for name in data if "Model" not in name and "Sequential" not in name} == found
    assert {entry["overflow"] for entry in data.values()} <= {"made"}
    assert flag.raised  # as a loss scaler would have found it


class Pair(nn.Module):
    """Two results that depend on one input each."""

    def forward(self, x, y):
        return x * 2, y * 2


def test_a_backward_pass_whose_end_is_not_seen_is_judged_by_its_values(tmp_path, monkeypatch):
    """Its second input has no gradient, and what is set later, in the rest of the pass, is not its own."""
    flag = Flag()
    monkeypatch.setattr(debugging, "DeviceOverflowFlags", lambda: flag)
    model = nn.ModuleDict({"pair": Pair()})

    def body():
        x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        model["pair"](Raises.apply(x, flag, False, True), y)[0].sum().backward()

    assert check(tmp_path, body, level="L0", model=model) == {}
    assert flag.raised


@pytest.mark.parametrize(
    ("body", "verdict"),
    [
        (lambda: torch.full((2, 2), 60000.0, dtype=torch.float16) * 2, "normal"),
        (lambda: torch.full((2,), 300.0).exp(), "normal"),
        (lambda: torch.full((2, 64), 100.0).half() @ torch.full((64, 2), 100.0).half(), "normal"),
    ],
)
def test_the_first_overflow_is_found_and_replayed(tmp_path, body, verdict):
    check(tmp_path, body)
    result = CliRunner().invoke(app, ["overflow", str(tmp_path / "dump")])
    assert result.exit_code == 1
    assert f"verdict: {verdict} overflow" in result.stdout


def test_a_device_that_computes_wrongly_is_at_fault(tmp_path):
    check(tmp_path, lambda: torch.full((2, 2), 60000.0, dtype=torch.float16) * 2)
    folder = tmp_path / "dump" / "step0" / "rank0" / "dump_tensor_data"
    torch.save(torch.ones(2, 2, dtype=torch.float16), folder / "Tensor.__mul__.0.forward.input.0.pt")
    result = CliRunner().invoke(app, ["overflow", str(tmp_path / "dump" / "step0")])
    assert "verdict: abnormal overflow: in double precision on the CPU its results are finite" in result.stdout


def test_a_backward_pass_is_replayed_too(tmp_path):
    x = torch.full((2,), 1e-30, requires_grad=True)

    def body():
        torch.log(x * 1.0).sum().mul(1e30).backward()

    path = tmp_path / "config.json"
    path.write_text(json.dumps({"dump_path": str(tmp_path / "dump"), "task": "tensor", "level": "L1"}))
    debugger = PrecisionDebugger(str(path))
    debugger.start()
    body()
    debugger.stop()
    debugger.step()
    result = CliRunner().invoke(app, ["overflow", str(tmp_path / "dump")])
    assert "Torch.log.0.backward on rank 0 made" in result.stdout
    assert "verdict: normal" in result.stdout


def test_a_dump_without_overflow_says_so_and_a_folder_without_a_dump_is_refused(tmp_path):
    assert check(tmp_path, lambda: torch.ones(2) + 1) == {}
    result = CliRunner().invoke(app, ["overflow", str(tmp_path / "dump")])
    assert (result.exit_code, "no NaN and no Inf" in result.stdout) == (0, True)
    assert CliRunner().invoke(app, ["overflow", str(tmp_path / "nowhere")]).exit_code == 2


def test_weights_whose_memory_is_elsewhere_are_left_out():
    """Sharded training releases a storage and keeps the tensor; what is read there ends the process."""
    released, view = torch.ones(8), torch.full((8,), torch.inf)
    released.untyped_storage().resize_(0)
    weights = [("released", released), ("fine", torch.ones(3)), ("eight bits", torch.ones(3).to(torch.float8_e4m3fn))]
    weights += [("view", view[2:5]), ("whole numbers", torch.ones(3, dtype=torch.int32)), ("empty", torch.ones(0))]
    assert nonfinite(weights) == ["view"]
