"""msprobe's monitor on MindSpore: the same calls and files, and weights, moments and directions that NumPy confirms."""

import csv
import json
import sys

import mindspore as ms
import numpy as np
import pytest
from cells import batches, net, weights
from mindspore import nn

from trainsentry.mindspore import MsprobeStep, TrainerMon
from trainsentry.mindspore.monitor import module_hook

KEYS = ("wg_distribution", "mv_distribution", "param_distribution", "mg_direction", "xy_distribution")


def rows(directory, table, step):
    with (directory / f"{table}_{step}-{step}.csv").open() as file:
        return {row["name"]: row for row in csv.DictReader(file)}


def trained(out, tmp_path, monkeypatch, steps=3, at=None, **changes):
    """Train; return the written directory, the monitor, and weights, gradients and first moments of each step."""
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(out))
    path = tmp_path / "monitor_config.json"
    path.write_text(json.dumps({"targets": {}, "ops": ["max", "mean"], **dict.fromkeys(KEYS, True), **changes}))
    model = net()
    optimizer = nn.Adam(model.trainable_params(), 1e-2)
    monitor = TrainerMon(str(path))
    monitor.set_monitor(model, grad_acc_steps=1, optimizer=optimizer)
    loss_fn = nn.MSELoss()
    grad = ms.value_and_grad(lambda x, y: loss_fn(model(x), y), None, optimizer.parameters)
    seen = []
    for step, (x, y) in enumerate(batches(steps)):
        (at or {}).get(step, lambda: None)()
        _, grads = grad(x, y)
        moments = [m.asnumpy().copy() for m in optimizer.moment1]
        optimizer(grads)
        seen.append((weights(model), [g.asnumpy() for g in grads], moments))
    monitor.close()
    [directory] = out.glob("*-rank0-*")
    return directory, [name for name, _ in model.parameters_and_names()], seen


def test_the_files_hold_what_numpy_computes(out, tmp_path, monkeypatch):
    directory, names, seen = trained(out, tmp_path, monkeypatch)
    after, grads, moments = seen[2]
    updated, reduced = rows(directory, "param_updated", 2), rows(directory, "grad_reduced", 2)
    first, direction = rows(directory, "exp_avg", 2), rows(directory, "other", 2)
    assert set(updated) == set(reduced) == set(first) == set(direction) == set(names)
    for name, weight, gradient, moment in zip(names, after, grads, moments, strict=True):
        assert float(updated[name]["max"]) == pytest.approx(weight.max(), abs=1e-6)
        assert float(reduced[name]["max"]) == pytest.approx(gradient.max(), abs=1e-6)
        assert float(first[name]["max"]) == pytest.approx(moment.max(), abs=1e-6)
        share = float(((np.sign(gradient) * np.sign(moment)).mean() + 1) / 2)
        assert float(direction[name]["mean"]) == pytest.approx(share, abs=1e-6)
    assert updated[names[0]]["dtype"] == "Float32"
    assert "head.output" in rows(directory, "actv", 1)


def test_the_names_of_msprobe_need_no_torch():
    assert module_hook.TrainerMon is TrainerMon
    assert MsprobeStep.__mro__[1].__module__.startswith("mindspore")
    assert "torch" not in sys.modules


def test_a_running_job_follows_commands(out, tmp_path, monkeypatch):
    from trainsentry.monitor.control.control_file import send

    monkeypatch.setattr("trainsentry.monitor.trainer.live_control.LOOK_SECONDS", 0.0)
    begin = {2: lambda: send(out / "control.jsonl", {"set": {"collect.activations": {"every": 1}}, "for": 2})}
    directory, _, _ = trained(out, tmp_path, monkeypatch, steps=7, at=begin, xy_distribution=False)
    written = sorted(path.name for path in directory.glob("actv_[0-9]*"))
    assert written == []  # not among what this configuration writes …
    lines = [json.loads(line) for line in (out / "rank0" / "sampling.jsonl").read_text().splitlines()]
    changed = [(line["step"], line["changed"]) for line in lines if "changed" in line]
    assert [step for step, _ in changed] == [3, 5]
    assert changed[0][1]["collect.activations.every"] == 1
    status = json.loads((out / "rank0" / "status.json").read_text())
    assert status["series"] > 100  # … but read
