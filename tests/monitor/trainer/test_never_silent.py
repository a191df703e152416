"""A run that is not recorded says so, names the missing call, and is never called healthy."""

import json
import logging
from collections import OrderedDict

import pytest
import torch
from tiny_models import mlp, train
from torch import nn
from typer.testing import CliRunner
from watched import make, status

import trainsentry
from trainsentry.monitor.cli.app import app
from trainsentry.monitor.recorder import publisher
from trainsentry.monitor.trainer import triggers, wiring

ACTIVATIONS = {"activations": {"every": 1}}


def told(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def backward(model, passes=1):
    for _ in range(passes):
        model(torch.randn(4, 8)).square().mean().backward()


def watch(out, model, optimizer=None, **settings):
    return trainsentry.TrainMonitor({"output_dir": str(out), "strict": True, **settings}).watch(model, optimizer)


def test_a_model_that_trains_without_a_step_is_named_within_20_passes_and_once(out, caplog, capsys):
    model = mlp()
    with watch(out, model) as monitor:
        backward(model, 19)
        assert told(caplog) == []
        backward(model, 60)
        (said,) = told(caplog)
        assert "no step was recorded in 20 backward passes: watch() got no optimizer" in said
        assert "call watch(model, optimizer)" in said
        monitor.flush()
        assert status(out)["note"] == "no step was recorded"
        assert "no step" in status(out)["failures"], "before the run ends"
    assert "trainsentry: no step was recorded, 0 incidents. Records are in" in capsys.readouterr().err


def test_of_two_optimizers_the_one_that_waits_is_named_and_may_be_watched_later(out, caplog):
    """An adversarial term joins after some thousand steps."""
    first, second = mlp(), nn.Sequential(OrderedDict(critic=mlp()))
    optimizers = torch.optim.AdamW(first.parameters()), torch.optim.SGD(second.parameters(), lr=0.1)

    def train(count):
        for _ in range(count):
            backward(first, 1)
            optimizers[0].step()

    with watch(out, [first, second], list(optimizers)):
        train(30)
        (said,) = told(caplog)
        assert "of the optimizers given to watch(), SGD has not stepped yet" in said
    caplog.clear()
    with trainsentry.TrainMonitor({"output_dir": str(out / "later")}).watch(first, optimizers[0]) as monitor:
        train(30)
        monitor.watch(second, optimizers[1])
        for _ in range(5):
            backward(first, 1)
            backward(second, 1)
            for optimizer in optimizers:
                optimizer.step()
        monitor.flush()
        assert status(out / "later")["step"] == 34
    assert told(caplog) == []


def test_an_optimizer_that_never_steps_is_named_and_accumulation_is_not(out, caplog):
    model, optimizer, monitor = make(out)
    with monitor:
        backward(model, 20)
    assert "the optimizer given to watch() (AdamW) has not stepped" in told(caplog)[0]
    caplog.clear()
    model, optimizer = mlp(), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = trainsentry.TrainMonitor({"output_dir": str(out)})
    with monitor.watch(model, optimizer, grad_acc_steps=32):
        backward(model, 32)
        optimizer.step()
        backward(model, 64)
    assert told(caplog) == []


def test_another_optimizer_that_trains_in_place_of_the_given_is_named(out, caplog):
    model, _, monitor = make(out)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    with monitor:
        for _ in range(20):
            other.step()
    assert "in 20 steps another optimizer (SGD) has trained the watched model" in told(caplog)[0]


def test_an_optimizer_that_comes_later_is_taken_at_its_first_step_and_an_optimizer_elsewhere_is_not(out):
    model, elsewhere = mlp(), mlp()
    with watch(out, model, None, collect={"parameters": {"every": 1}}) as monitor:
        optimizer = torch.optim.AdamW(model.parameters())
        other = torch.optim.SGD(elsewhere.parameters(), lr=0.1)
        for _ in range(3):
            backward(elsewhere)
            other.step()
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
        frame = monitor.records()
    assert sorted(frame.step.unique()) == [0, 1, 2]
    for quantity in ("gradient", "parameter"):
        rows = frame[frame.quantity == quantity].groupby("step").size()
        assert rows.to_dict() == dict.fromkeys(range(3), 4), "the first step is whole"
    assert (frame[frame.quantity == "exp_avg"].step > 0).all(), "and its state"


def test_adapters_that_come_after_watch_are_recorded_once_their_optimizer_steps(out):
    model = mlp()
    with watch(out, model, collect=ACTIVATIONS) as monitor:
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        model.append(nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model[3].parameters(), lr=0.1)
        for _ in range(3):
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
        assert set(monitor.metrics("gradient")) == {"3.weight", "3.bias"}
        assert "3.output.0" in monitor.metrics("activation_output")


@pytest.mark.parametrize("optimizers", [1, 2])
def test_marked_steps_stay_the_steps_when_optimizers_come_later(out, optimizers):
    model = nn.ModuleDict({"first": mlp(), "second": mlp()})
    parts = list(model.values())[:optimizers]
    with watch(out, model) as monitor:
        made = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]
        for _ in range(5):
            for part, optimizer in zip(parts, made, strict=True):
                backward(part)
                optimizer.step()
            monitor.step()
        frame = monitor.records()
    steps = frame[frame.quantity == "gradient"].groupby("step").size()
    many = 5 + (optimizers - 1)
    assert list(steps.index) == list(range(many)), "with two, the first step ended after the first optimizer"
    assert (steps.iloc[2:] == 4 * optimizers).all()


def test_steps_without_a_gradient_are_named(out, caplog):
    model, optimizer, monitor = make(out)
    with monitor:
        for _ in range(25):
            backward(model)
            optimizer.zero_grad()
            optimizer.step()
    assert [m for m in told(caplog) if "no gradient was seen in 20 steps" in m]
    assert len(told(caplog)) == 1


def test_a_watched_model_of_which_another_copy_trains_is_named(out, caplog):
    torch._dynamo.utils.counters.clear()  # nothing is compiled, as far as this process tells
    model, optimizer, monitor = make(out)
    running = mlp()
    with monitor:
        for _ in range(3):
            backward(running)
            for ours, theirs in zip(model.parameters(), running.parameters(), strict=True):
                ours.grad = theirs.grad
            optimizer.step()
    assert "3 of 3 watched modules were not called in the first recorded step" in told(caplog)[0]


def test_a_resumed_run_misses_no_module_and_learns_its_graph(out, caplog):
    model, optimizer, monitor = make(out, collect={"activations": {"every": 1}})
    with monitor:
        backward(model)
        optimizer.step()
        state = monitor.state_dict()
        ordered = list(monitor._loop.watch.flow.order)
    caplog.clear()
    model, optimizer, monitor = make(out, collect={"activations": {"every": 1}})
    with monitor:
        monitor.load_state_dict(state)  # after watch, whose step has begun
        for _ in range(3):
            backward(model)
            optimizer.step()
        assert monitor._loop.watch.flow.order == ordered
        assert len(monitor._loop.watch.flow.edges) == 2
    assert not [m for m in told(caplog) if "not called" in m]


def test_a_module_list_that_is_never_called_is_not_missed_once_the_model_is_compiled(out, caplog):
    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(out, model, optimizer, collect=ACTIVATIONS):
        compiled = torch.compile(model, backend="eager")
        for _ in range(4):
            backward(compiled)
            optimizer.step()
    assert told(caplog) == []


def command(*args):
    result = CliRunner().invoke(app, [str(a) for a in args])
    return result.exit_code, result.output + result.stderr


def test_no_command_calls_a_run_without_steps_healthy(out):
    watch(out, mlp()).close()
    said = {name: command(*name.split(), out) for name in ("diagnose", "watch --once", "report")}
    assert all("o step was recorded" in text for _, text in said.values()), said
    assert not any("nothing abnormal" in text or "No incident" in text for _, text in said.values())
    assert (said["diagnose"][0], said["report"][0]) == (2, 2)
    page = (out / "report.html").read_text()
    assert "No step was recorded." in page
    assert "othing abnormal" not in page


def test_a_monitor_gives_way_to_a_newer_one_of_its_model_or_directory(out, tmp_path, caplog):
    model, optimizer, first = make(out)
    train(model, optimizer, 2, first)
    again = watch(tmp_path / "other", model, optimizer)
    assert "an earlier monitor of this process watches this model too, so it is closed now" in told(caplog)[0]
    assert status(out)["state"] == "closed"
    train(model, optimizer, 2)
    assert again.metrics("gradient")
    third = watch(tmp_path / "other", mlp())
    assert f"writes to {tmp_path / 'other'} too" in told(caplog)[1]
    third.close()
    assert len(told(caplog)) == 2


def test_models_of_a_list_that_share_names_are_told_apart_and_metrics_keeps_all(out):
    generator, critic = mlp(), mlp()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (generator, critic)]
    with watch(out, [generator, critic], optimizers, collect=ACTIVATIONS) as monitor:
        for model, optimizer in zip((generator, critic), optimizers, strict=True):
            backward(model)
            optimizer.step()
        names = {f"{i}.{n}.{leaf}" for i in (0, 1) for n in (0, 2) for leaf in ("weight", "bias")}
        assert set(monitor.metrics("gradient")) == names == set(monitor.records().query("quantity == 'gradient'").name)
        assert {"0.output.0", "1.output.0", "1.2.output.0"} <= set(monitor.metrics("activation_output"))


class Headed(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(x)


def test_models_of_a_list_with_names_of_their_own_keep_them_and_metrics_keeps_all(out):
    first, second = nn.Sequential(nn.Linear(8, 4)), Headed()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    with watch(out, [first, second], optimizer, collect=ACTIVATIONS) as monitor:
        backward(first)
        backward(second)
        optimizer.step()
        assert set(monitor.metrics("gradient")) == {"0.weight", "0.bias", "head.weight", "head.bias"}
        outputs = monitor.metrics("activation_output")
        assert set(outputs) == {"0.output.0", "0.0.output.0", "1.output.0", "1.head.output.0"}


def test_an_incident_names_what_to_do_next_and_the_end_repeats_it(out, caplog, capsys):
    model, optimizer, monitor = make(out)
    with monitor:
        train(model, optimizer, 8, before_step=lambda s: model[2].weight.data.fill_(torch.nan) if s == 5 else None)
    (said,) = [m for m in told(caplog) if "incident 1" in m]
    assert said.endswith(f"Next: trainsentry report {out}; its tensors are dumped to {out}/dump")
    end = capsys.readouterr().err.splitlines()
    assert end[0].startswith("trainsentry: 8 steps watched, 1 incident; the monitor added")
    assert end[1:] == [
        f"trainsentry: incident 1: {monitor.incidents[0].summary}",
        f"trainsentry: next: trainsentry report {out}",
    ]


def test_a_run_that_stays_non_finite_says_so_again_at_most_every_so_many_steps(out, caplog, monkeypatch, in_thread):
    monkeypatch.setattr(triggers, "SAID_EVERY", 10)
    monkeypatch.setattr(publisher, "PUBLISHED_EVERY", 10)
    model, optimizer, monitor = make(out)

    def broken(step):
        if step == 3:
            model[2].weight.data.fill_(torch.nan)
        monitor.flush()

    with monitor:
        train(model, optimizer, 30, before_step=broken)
    again = [m for m in told(caplog) if "incident 1, still at step" in m]
    assert len(again) == 2, told(caplog)


def test_python_dash_m_is_the_command_line():
    import subprocess
    import sys

    run = subprocess.run([sys.executable, "-m", "trainsentry", "--version"], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == trainsentry.__version__


def test_a_folder_of_runs_lists_them_and_a_file_is_told_so(tmp_path):
    for name in ("run_a", "run_b"):
        make(tmp_path / name)[2].close()
    for name in ("diagnose", "watch", "report"):
        code, text = command(name, tmp_path)
        assert code == 2
        assert "holds several runs; give one of them:" in text
        assert "run_a" in text
        assert "run_b" in text
        code, text = command(name, tmp_path / "run_a" / "run.json")
        assert (code, "is a file; allowed: the output directory" in text) == (2, True), text


@pytest.mark.parametrize(
    ("key", "nearest"), [("targets", None), ("xy_distribution", None), ("output_dirs", "output_dir")]
)
def test_a_key_is_suggested_only_when_it_is_close(key, nearest):
    with pytest.raises(trainsentry.ConfigError) as error:
        trainsentry.TrainMonitor({key: 1})
    assert (f"the closest known one is {nearest!r}" in str(error.value)) == (nearest is not None)
    assert ("closest" in str(error.value)) == (nearest is not None)


def test_the_note_goes_once_a_step_is_recorded(out):
    model, optimizer, monitor = make(out)
    with monitor:
        train(model, optimizer, 2, monitor)
    assert "note" not in json.loads((out / "rank0" / "status.json").read_text())


def test_passes_are_counted_where_gradients_are_not_recorded_too(out, caplog):
    model = mlp()
    with watch(out, model, collect={"gradients": False}):
        backward(model, 20)
    assert "no step was recorded in 20 backward passes" in told(caplog)[0]


@pytest.mark.parametrize(("compiled", "count"), [(True, 0), (False, 1)])
def test_a_missing_kernel_is_said_once_with_what_brings_it(out, caplog, monkeypatch, compiled, count):
    """Reading with NumPy takes many times as long, and nothing else shows why."""
    monkeypatch.setattr(wiring, "is_compiled", lambda: compiled)
    model = mlp()
    with watch(out, model, torch.optim.SGD(model.parameters(), lr=0.1)):
        backward(model)
    said = [line for line in told(caplog) if "install a C compiler" in line]
    assert len(said) == count
