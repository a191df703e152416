"""The public methods of TrainMonitor keep their documented behaviour."""

import gc
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from importlib import metadata
from pathlib import Path

import pandas as pd
import pytest
import torch
from forked_scripts import Script, run_forked
from tiny_models import EVERY_STEP, flip_bit, mlp, train
from written_files import json_lines

import trainsentry


def make(out, collect=None, model=None, lr=0.1, **config):
    torch.manual_seed(0)
    model = model or mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    settings = {"output_dir": str(out), "strict": True, "collect": collect or {}, **config}
    return model, optimizer, trainsentry.TrainMonitor(settings).watch(model, optimizer)


def exactly(path):
    """Read a table to the last bit, as pandas does of itself from 3.0 on."""
    old = int(pd.__version__.partition(".")[0]) < 3
    return pd.read_csv(path, **({"float_precision": "round_trip"} if old else {}))


def test_a_source_tree_without_the_metadata_of_a_package_is_watched_too(out, monkeypatch):
    """As one that is copied to a machine and put on PYTHONPATH."""
    installed = metadata.distribution

    def distribution(name):
        if name == "trainsentry":
            raise metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(metadata, "distribution", distribution)
    model, optimizer, monitor = make(out)
    with monitor:
        train(model, optimizer, 2, monitor)
    run = json.loads((out / "run.json").read_text())
    assert run["versions"]["trainsentry"] == trainsentry.__version__


def test_records_and_metrics_give_the_numbers_that_stand_in_the_csv(out):
    model, optimizer, monitor = make(out, EVERY_STEP)
    with monitor:
        train(model, optimizer, 4, monitor)
        monitor.flush()
        memory = monitor.records()
        newest = monitor.metrics("gradient")
    for quantity in (
        "gradient",
        "parameter",
        "momentum_buffer",
        "update",
        "activation_output",
        "activation_grad_input",
    ):
        disk = exactly(out / "rank0" / f"{quantity}_0-999.csv")
        own = memory[memory["quantity"] == quantity].reset_index(drop=True)
        assert disk["name"].tolist() == own["name"].tolist()
        for column in ("step", "micro_step", "order", "min", "max", "mean", "norm", "nans", "infs", "zeros"):
            assert disk[column].tolist() == pytest.approx(own[column].tolist(), rel=0, abs=0, nan_ok=True), column
    disk = exactly(out / "rank0" / "gradient_0-999.csv").query("step == 3").set_index("name")
    assert {name: values["norm"] for name, values in newest.items()} == disk["norm"].to_dict()
    scalars = exactly(out / "rank0" / "scalars_0-999.csv").query("name == 'loss'")
    assert scalars["value"].tolist() == memory[memory["quantity"] == "loss"]["value"].tolist()
    assert monitor.metrics("loss")["loss"]["value"] == scalars["value"].tolist()[-1]


def test_last_limits_records_to_the_last_steps(out):
    model, optimizer, monitor = make(out)
    with monitor:
        train(model, optimizer, 5)
        assert sorted(set(monitor.records(last=2)["step"])) == [3, 4]
        assert monitor.records(last=0).empty


def test_the_files_of_a_run(out):
    model, optimizer, monitor = make(out, EVERY_STEP, export={"tensorboard": True})
    with monitor:
        train(model, optimizer, 2, monitor)
    run = json.loads((out / "run.json").read_text())
    assert (run["schema_version"], run["world_size"], run["framework"]) == (1, 1, "pytorch")
    assert run["configuration"]["collect"]["gradients"]["every"] == 1
    status = json.loads((out / "rank0" / "status.json").read_text())
    assert (status["state"], status["step"], status["records"]) == ("closed", 1, 2)
    assert list((out / "tensorboard" / "rank0").glob("events.out.tfevents.*"))


def test_a_loop_without_an_optimizer_marks_its_steps(out):
    model = mlp()
    with trainsentry.TrainMonitor({"output_dir": str(out), "strict": True}).watch(model) as monitor:
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(2, 8)).sum().backward()
            monitor.step()
        assert sorted(set(monitor.records()["step"])) == [0, 1, 2]


def test_a_step_of_several_optimizers_ends_with_the_last(out):
    first, second = mlp(), mlp()
    both = torch.nn.ModuleDict({"first": first, "second": second})
    optimizers = [torch.optim.SGD(first.parameters(), lr=0.1), torch.optim.AdamW(second.parameters())]
    config = {"output_dir": str(out), "strict": True, "collect": EVERY_STEP}
    with trainsentry.TrainMonitor(config).watch(both, optimizers) as monitor:
        for _ in range(3):
            loss = first(torch.ones(2, 8)).sum() + second(torch.ones(2, 8)).sum()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        table = monitor.records()
        gradients = table[table["quantity"] == "gradient"]
        assert sorted(set(table["step"])) == [0, 1, 2]
        assert gradients.groupby("step")["name"].nunique().tolist() == [8, 8, 8]
        assert len(table[table["quantity"] == "update"]) == 24


def test_request_stop_stops_at_the_next_boundary_once(out):
    model, optimizer, monitor = make(out)
    with monitor:
        train(model, optimizer, 2, monitor)
        monitor.request_stop("enough")
        with pytest.raises(trainsentry.TrainingStopped, match="enough") as stopped:
            train(model, optimizer, 5, monitor)
        assert isinstance(stopped.value, RuntimeError)
        assert (stopped.value.reason, stopped.value.incident) == ("enough", None)
        train(model, optimizer, 1, monitor)


def test_callbacks_run_in_the_training_thread_once_per_incident_and_may_fail(out, caplog):
    model, optimizer, monitor = make(out, strict=False)
    heard = []
    monitor.on_incident(lambda incident: heard.append((incident.name, threading.current_thread())))
    monitor.on_incident(lambda incident: 1 / 0)
    with monitor:
        train(model, optimizer, 22, before_step=lambda s: flip_bit(model[2].weight) if s == 11 else None)
    assert [(name, thread) for name, thread in heard] == [("2.weight", threading.main_thread())]
    assert monitor._guard.failures["on_incident"].count == 1


def test_state_goes_into_a_checkpoint_and_the_run_goes_on_beside_the_old_files(out, tmp_path):
    model, optimizer, monitor = make(out)
    with monitor:
        train(model, optimizer, 12, monitor)
        state = monitor.state_dict()
        train(model, optimizer, 3, monitor)
    assert state["step"] == 12
    torch.save(state, tmp_path / "checkpoint.pt")
    model, optimizer, resumed = None, None, None
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    resumed = trainsentry.TrainMonitor({"output_dir": str(out), "strict": True})
    resumed.load_state_dict(torch.load(tmp_path / "checkpoint.pt"))
    with resumed.watch(model, optimizer):
        train(model, optimizer, 2, resumed)
    assert (out / "rank0" / "gradient_12-999.r1.csv").exists()
    assert set(pd.read_csv(out / "rank0" / "gradient_12-999.r1.csv")["step"]) == {12, 13}
    assert len(json.loads((out / "run.json").read_text())["starts"]) == 2


def test_after_close_nothing_is_left(out):
    before = set(threading.enumerate())
    descriptors = set(os.listdir("/proc/self/fd"))
    step = torch.optim.SGD.step
    model, optimizer, monitor = make(out, EVERY_STEP)
    process = monitor._loop.link.running.process
    train(model, optimizer, 3, monitor)
    monitor.close()
    monitor.close()
    assert process.poll() == 0
    assert set(threading.enumerate()) == before
    assert set(os.listdir("/proc/self/fd")) == descriptors
    assert torch.optim.SGD.step is step
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert not any(p._post_accumulate_grad_hooks or p._backward_hooks for p in model.parameters())
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    train(model, optimizer, 1)


def test_the_recorder_steps_aside(out):
    """A session of its own would make `nice` void: Linux weighs sessions against each other first."""
    model, optimizer, monitor = make(out)
    with monitor:
        train(model, optimizer, 1, monitor)
        monitor.flush()
        recorder = monitor._loop.link.running.process.pid
        assert os.getsid(recorder) == os.getsid(0)
        assert os.getpgid(recorder) == recorder
        assert os.getpriority(os.PRIO_PROCESS, recorder) > os.getpriority(os.PRIO_PROCESS, 0)


SCRIPT = """
import os, sys, torch, trainsentry
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
monitor = trainsentry.TrainMonitor({"output_dir": sys.argv[1]})
monitor.watch(model, optimizer)
for step in range(30):
    optimizer.zero_grad(); model(torch.ones(2, 4)).sum().backward(); optimizer.step()
print(monitor._loop.link.running.process.pid, flush=True)
"""


ENDINGS = {
    "by itself": ("", "closed"),
    "with a status": ("raise SystemExit(3)", "closed"),
    "at once": ("os._exit(0)", "trainer gone"),
    "killed": ("os.kill(os.getpid(), 9)", "trainer gone"),
}


def named_memory():
    """Return the names of shared memory, without what workers of torch and of multiprocessing in other tests hold."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("sem.", "torch_"))}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The folders of scripts that end in several ways, the processes of their recorders, and what is left in memory."""
    root = tmp_path_factory.mktemp("ended")
    before = named_memory()
    scripts = {name: Script(SCRIPT + ending, [root / name]) for name, (ending, _) in ENDINGS.items()}
    done = run_forked(scripts)
    recorders = {name: Path(f"/proc/{done[name].stdout.split()[0]}") for name in ENDINGS}
    end = time.monotonic() + 60
    while any(path.exists() for path in recorders.values()) and time.monotonic() < end:
        time.sleep(0.1)
    return root, recorders, named_memory() - before


@pytest.mark.parametrize("name", ENDINGS)
def test_an_interpreter_that_ends_without_close_leaves_no_process_and_loses_nothing(ended, name):
    root, recorders, left = ended
    assert not recorders[name].exists()
    assert not left
    table = pd.read_csv(root / name / "rank0" / "gradient_0-999.csv")
    assert sorted(set(table["step"])) == list(range(30))
    assert len(table) == 60
    assert json.loads((root / name / "rank0" / "status.json").read_text())["state"] == ENDINGS[name][1]


def test_a_training_process_loads_no_library_that_only_reports_need(out):
    ending = 'monitor.close(); print([m for m in ("pandas", "jinja2", "rich", "tensorboard") if m in sys.modules])'
    done = subprocess.run([sys.executable, "-c", SCRIPT + ending, str(out)], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_anomalies_are_written_a_line_each(out):
    model, optimizer, monitor = make(out)
    with monitor:
        train(model, optimizer, 22, monitor, before_step=lambda s: flip_bit(model[2].weight) if s == 11 else None)
    lines = json_lines(out / "rank0" / "anomalies.jsonl")
    keys = "step micro_step rank order name quantity statistic value expected score detector kind".split()
    assert list(lines[0])[:12] == keys
    assert {line["quantity"] for line in lines} >= {"parameter", "gradient"}


def test_a_monitor_that_nobody_holds_goes_on_and_one_with_its_model_gone_ends(out):
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainsentry.TrainMonitor({"output_dir": str(out)}).watch(model, optimizer)
    gc.collect()
    train(model, optimizer, 3)
    hook = next(iter(optimizer._optimizer_step_pre_hooks.values()))
    recorder = hook.owner.listener.owner._loop.link.running.process
    assert recorder.poll() is None
    kept = weakref.ref(model)
    del model, optimizer, hook
    gc.collect()
    assert kept() is None, "a sweep of many models would keep them all"
    recorder.wait(10)
