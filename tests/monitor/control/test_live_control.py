"""A running job follows its configuration file and its owner's commands, at a step boundary, and says so."""

import json
import os
from pathlib import Path

import pytest
import torch
from tiny_models import mlp, train
from typer.testing import CliRunner
from written_files import json_lines

import trainsentry
from trainsentry.exporters.files.foreign_files import InputError
from trainsentry.monitor.cli.app import app
from trainsentry.monitor.control.control_file import ControlFile, parse_command, send
from trainsentry.monitor.trainer import live_control

SELDOM = {part: {"every": 50} for part in ("gradients", "parameters", "optimizer_state", "updates", "activations")}


@pytest.fixture(autouse=True)
def _look_at_every_step(monkeypatch):
    monkeypatch.setattr(live_control, "LOOK_SECONDS", 0.0)


@pytest.fixture
def job(out):
    """A monitored model whose parts are sampled every 50 steps; `job(steps, at)` runs `at[step]()` before steps."""
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = {"output_dir": str(out), "collect": SELDOM, "strict": True}
    monitor = trainsentry.TrainMonitor(config).watch(model, optimizer)
    train(model, optimizer, 1, monitor)
    monitor.flush()

    def run(steps, at=None):
        train(model, optimizer, steps - 1, monitor, before_step=lambda s: (at or {}).get(s + 1, lambda: None)())

    run.monitor, run.model = monitor, model
    yield run
    monitor.close()


def ctl(out, *args):
    done = CliRunner().invoke(app, ["ctl", str(out), *map(str, args)])
    assert done.exit_code == 0, done.output


def steps_of(out, table):
    import pandas as pd

    return sorted(set(pd.concat(pd.read_csv(p) for p in (out / "rank0").glob(f"{table}_*.csv"))["step"]))


def changes(out):
    return [
        (line["step"], line["changed"]) for line in json_lines(out / "rank0" / "sampling.jsonl") if "changed" in line
    ]


def test_a_part_is_sampled_densely_for_some_steps_and_then_as_before(out, job):
    job(12, {3: lambda: ctl(out, "set", "collect.activations.every=1", "--for", 4)})
    job.monitor.close()
    assert steps_of(out, "activation_output") == [0, 4, 5, 6, 7]
    assert changes(out) == [(4, {"collect.activations.every": 1}), (8, {"collect.activations.every": 50})]


def test_parts_and_exporters_go_on_and_off(out, job):
    job(
        9,
        {
            2: lambda: ctl(out, "set", "collect.gradients.before_reduction=true", "collect.gradients.every=1"),
            4: lambda: ctl(out, "set", "collect.gradients=false", "export.tensorboard=true"),
            6: lambda: ctl(out, "set", "export.csv=false", "collect.parameters.every=1"),
        },
    )
    job.monitor.close()
    assert steps_of(out, "gradient") == [0, 3, 4]
    assert steps_of(out, "gradient_unreduced") == [3, 4]
    assert steps_of(out, "parameter") == [0]
    assert list((out / "tensorboard" / "rank0").iterdir())


def test_a_requested_dump_holds_every_module_and_a_requested_stop_ends_the_training(out, job):
    with pytest.raises(trainsentry.TrainingStopped, match="maintenance"):
        job(
            9,
            {
                2: lambda: ctl(out, "dump", "now"),
                5: lambda: ctl(out, "stop", "--reason", "maintenance"),
            },
        )
    job.monitor.close()
    dump = json.loads((out / "dump" / "step3" / "rank0" / "dump.json").read_text())
    assert {"Module.0.Linear.forward.0", "Module.2.Linear.forward.0"} <= set(dump["data"])
    assert job.monitor.incidents == ()
    assert changes(out) == [(3, {"dump": "now"}), (6, {"stop": "maintenance"})]


def test_a_command_that_is_wrong_is_said_and_the_next_one_holds(out, job, caplog):
    def wrong():
        for command in ({"set": {"collect.gradients.every": 1}, "for": "x"}, {"sett": 1}, {"set": {"output_dir": "x"}}):
            send(out / "control.jsonl", command)

    def conflicting():
        ctl(out, "set", "stop_step=20", "--for", 3)
        ctl(out, "set", "start_step=30", "--for", 2)

    def wrong_and_right():
        wrong()
        ctl(out, "set", "collect.parameters.every=3")

    job(12, {2: wrong_and_right, 4: lambda: ctl(out, "set", "collect.gradients.every=1", "--for", 2), 8: conflicting})
    job.monitor.close()
    assert steps_of(out, "gradient") == [0, 5, 6]
    assert steps_of(out, "parameter") == [0, 3, 6, 9]
    assert caplog.text.count("left as it is") >= 4
    assert "stop_step: 20; allowed" in caplog.text
    assert not job.monitor._guard.failures


def test_thresholds_reach_the_detectors(out, job):
    job(6, {2: lambda: ctl(out, "set", "detect.false_alarms_per_1000_steps=3.5", "on_incident.stop=true")})
    assert job.monitor._loop.triggers.settings.stop
    job.monitor.close()
    assert changes(out)[0][1] == {"detect.false_alarms_per_1000_steps": 3.5, "on_incident.stop": True}


def test_the_configuration_file_is_read_again_when_it_changes(out, tmp_path, caplog):
    path = tmp_path / "monitor.json"

    def write(**config):
        path.write_text(json.dumps({"output_dir": str(out), "collect": SELDOM, **config}))

    write()
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = trainsentry.TrainMonitor(path).watch(model, optimizer)
    now = {
        3: lambda: write(collect={**SELDOM, "gradients": {"every": 2}}, eps=0.5),
        6: lambda: path.write_text('{"colect": 1}'),
    }
    train(model, optimizer, 10, monitor, before_step=lambda step: now.get(step, lambda: None)())
    monitor.close()
    assert steps_of(out, "gradient") == [0, 4, 6, 8]
    assert "eps take effect at the next start" in caplog.text
    assert "left as it is" in caplog.text
    assert "colect: unknown key" in caplog.text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["set", "output_dir=x"], "a key that may change"),
        (["set", "collect.gradients.every=0"], "collect.gradients.every: got 0"),
        (["set", "collect.gradients.often=1"], "unknown key"),
        (["dump", "later"], "allowed: set"),
    ],
)
def test_a_mistake_is_said_and_not_sent(out, job, args, message):
    done = CliRunner().invoke(app, ["ctl", str(out), *args])
    assert done.exit_code == 2
    assert message in done.stderr
    assert not (out / "control.jsonl").exists()


def test_a_job_that_has_ended_takes_no_command(out, job):
    job.monitor.close()
    done = CliRunner().invoke(app, ["ctl", str(out), "stop"])
    assert done.exit_code == 2
    assert "has ended" in done.stderr


def test_the_numbers_of_the_training_do_not_change(out, job):
    job(8, {2: lambda: ctl(out, "set", "collect.activations.every=1"), 5: lambda: ctl(out, "dump", "now")})
    torch.manual_seed(0)
    bare = mlp()
    optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-2)
    train(bare, optimizer, 1)
    train(bare, optimizer, 7)
    assert all(torch.equal(a, b) for a, b in zip(bare.parameters(), job.model.parameters(), strict=True))


# ---------------------------------------------------------------------- the file


def commands(reader):
    return [parse_command(line) for line in reader.new_lines()]


def test_the_file_is_its_owners_alone_and_only_new_lines_count(tmp_path):
    path = tmp_path / "control.jsonl"
    send(path, {"stop": "an earlier run's"})
    assert path.stat().st_mode & 0o777 == 0o600
    reader = ControlFile(path)
    assert commands(reader) == []
    send(path, {"dump": "now"})
    with path.open("a") as file:
        file.write('{"stop"')
    assert commands(reader) == [{"dump": "now"}]
    with path.open("a") as file:
        file.write(': "half"}\n')
    assert commands(reader) == [{"stop": "half"}]


@pytest.mark.parametrize("break_it", ["writable", "link", "owner"])
def test_a_file_that_others_may_have_written_is_refused(tmp_path, break_it, monkeypatch):
    path = tmp_path / "control.jsonl"
    reader = ControlFile(path)
    target = Path(tmp_path / "theirs") if break_it == "link" else path
    target.write_text('{"stop": "theirs"}\n')
    target.chmod(0o622 if break_it == "writable" else 0o600)
    if break_it == "link":
        path.symlink_to(target)
    if break_it == "owner":
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(OSError, match=r"others may write|belongs to user|symbolic links"):
        commands(reader)
    assert commands(reader) == []
    with pytest.raises(OSError, match=r"others may write|belongs to user|symbolic links"):
        send(path, {"dump": "now"})


def test_a_line_that_is_no_command_is_an_error_and_later_ones_are_read(tmp_path):
    path = tmp_path / "control.jsonl"
    reader = ControlFile(path)
    path.touch(mode=0o600)
    path.write_text('[1]\n{"set": 1}\n{"stop": "x", "dump": "now"}\n{"set": {}, "for": 0}\n')
    for line in reader.new_lines():
        with pytest.raises(InputError):
            parse_command(line)
    send(path, {"stop": "now"})
    assert commands(reader) == [{"stop": "now"}]
