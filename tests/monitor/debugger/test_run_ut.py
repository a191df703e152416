"""run_ut checks a step's own results at its end, judges nothing overwritten, and leaves the training as it is."""

import csv
import json
import logging
import sys

import pytest
import torch
import torch.nn.functional as F
from debugged import Awkward, Encoder, make, train
from torch import nn

from trainsentry import PrecisionDebugger
from trainsentry.exporters.dumps.accuracy_csv import DETAIL_COLUMNS, RESULT_COLUMNS
from trainsentry.monitor.accuracy import worker_pool
from trainsentry.monitor.debugger import step_check


def start(folder, steps=(), **settings):
    """Return a debugger with the task."""
    path = folder / "config.json"
    whole = {"task": "run_ut", "dump_path": str(folder / "dump"), "step": list(steps), "run_ut": settings}
    path.write_text(json.dumps(whole))
    return PrecisionDebugger(str(path))


def rows(folder, step=0, part="result"):
    """Return the rows of a step's table by their first cell."""
    [path] = (folder / "dump" / f"step{step}" / "rank0").glob(f"accuracy_checking_{part}_*.csv")
    with path.open(encoding="utf-8-sig", newline="") as file:
        table = list(csv.reader(file))
    assert tuple(table[0]) == (RESULT_COLUMNS if part == "result" else DETAIL_COLUMNS)
    return {row[0]: row[1:] for row in table[1:]}


def check(folder, *bodies, **settings):
    """Run each body as one step; return the rows of the first one's results."""
    debugger = start(folder, **settings)
    for body in bodies:
        debugger.start()
        body()
        debugger.stop()
        debugger.step()
    failures = {k: v for k, v in debugger._session.guard.failures.items() if "several backward" not in k}
    assert failures == {}
    debugger.close()
    assert {path.name for path in (folder / "dump").iterdir()} == {f"step{i}" for i in range(len(bodies))}
    return rows(folder)


def usual_calls():
    make(Encoder)(torch.randn(3, 5)).backward()
    attention = nn.MultiheadAttention(16, 4, batch_first=True)
    x = torch.randn(3, 5, 16, requires_grad=True)
    attention(x, x, x)[0].square().mean().backward()  # one tensor at three places
    m = torch.randn(9, 9, requires_grad=True)
    (torch.cat([m * m, m])[:9] @ m).mean().backward()
    c = torch.randn(4, dtype=torch.complex64, requires_grad=True)
    (c * c.conj()).abs().sum().backward()
    first, second = torch.randn(20, requires_grad=True).split([5, 15])
    (first.sum() * second.mean()).backward()


def halves():
    model, x = make(nn.Sequential), torch.randn(8, 32)
    for layer in (nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 16), nn.Softmax(-1)):
        model.append(layer)
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(x), torch.arange(8)) + (model[0].weight @ model[0].weight.t()).mean()
    (loss * 128).backward()  # the weight's cast is shared: its gradient is that of two calls


def accumulated():
    weight = torch.randn(4, 3, 2, requires_grad=True)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            y = F.conv1d(torch.randn(2, 3, 9), weight)
        y.float().square().sum().backward()


def overwritten():
    x = torch.randn(30, 30, requires_grad=True)
    y = torch.mm(x, x)
    z = F.silu(y)
    y.data.add_(5)  # autograd does not count it: silu's backward pass computes with other numbers than it got
    q = torch.exp(y)
    y.data.add_(1)
    (z * q.detach()).mean().backward()
    x.data.zero_()
    b = torch.randn(30)
    e = torch.exp(b)
    b.zero_()
    torch.log(e)
    e.numpy()[:] = 7.0
    h = torch.randn(30, 30, requires_grad=True)
    w = torch.randn(30, 30, requires_grad=True)
    h.register_hook(lambda gradient: gradient.mul_(3))  # it changes the gradient that the call has sent
    F.linear(h, w).square().mean().backward()


def uncomparable():
    x = torch.randn(20, requires_grad=True)
    F.rrelu(x, training=True).sum().backward()
    nn.Embedding(10, 4, sparse=True)(torch.tensor([1, 3])).square().sum().backward()
    torch.linalg.svd(torch.randn(4, 4))
    torch.func.grad(lambda q: (q**2).sum())(torch.randn(3))


def test_a_clean_step_passes_and_nothing_is_judged_on_overwritten_values(tmp_path):
    bodies = (usual_calls, halves, accumulated, overwritten, uncomparable)
    torch.manual_seed(0)
    found = check(tmp_path, lambda: [body() for body in bodies])
    assert {row[0] for row in found.values()} | {row[1] for row in found.values()} == {"pass", "SKIP", " "}
    assert sum(row[:2] == ["pass", "pass"] for row in found.values()) > 40
    left_out = {name: row[2] for name, row in found.items() if row[2]}
    assert "in place between the call and its backward pass" in left_out.pop("Functional.silu.1")
    assert "in place between the call and its backward pass" in left_out.pop("Torch.mm.0")
    assert left_out.pop("Functional.rrelu.0") == "not compared: draws random numbers"
    assert left_out.pop("Torch.svd.0").endswith("another one of torch.linalg")
    assert left_out.pop("Functional.embedding.1").startswith("no backward pass: takes or returns")
    assert {name.split(".")[1] for name in left_out} <= {"__pow__", "sum"}  # inside functorch
    details = rows(tmp_path, part="details")
    first, second, hooked = [name for name in found if name.startswith("Functional.linear.")][-3:]
    assert f"{first}.backward.output.1" not in details  # the weight whose cast is shared
    assert details[f"{second}.backward.output.1"][-2] == "pass"
    assert [details[f"Functional.conv1d.{i}.backward.output.1"][-2] for i in (0, 1)] == ["pass", "pass"]
    assert f"{hooked}.backward.output.0" not in details  # the gradient that the hook has changed
    assert details[f"{hooked}.backward.output.1"][-2] == "pass"


@pytest.fixture
def wrong_silu():
    """Give silu a kernel of this process that computes float32 in bfloat16."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("silu", lambda x: x.sigmoid().mul(x).bfloat16().to(x.dtype), "CPU")
    yield
    library._destroy()


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_the_trainings_own_wrong_results_are_named_and_their_tensors_kept(tmp_path, wrong_silu, caplog):
    def body():
        x = torch.linspace(1.1, 1.9, 8, requires_grad=True)
        F.silu(F.linear(x, torch.eye(8))).sum().backward()
        F.silu(x).sum()
        F.silu(x).sum()

    with caplog.at_level(logging.WARNING, "trainsentry"):
        lists = {"white_list": ["silu", "Functional.linear"], "black_list": ["Functional.silu.1"]}
        found = check(tmp_path, body, body, **lists, error_data_path=str(tmp_path / "errors"), max_bytes=3000)
    assert list(found) == ["Functional.linear.0", "Functional.silu.0", "Functional.silu.2"]
    assert [row[:2] for row in found.values()] == [["pass", "pass"], ["error", "pass"], ["error", " "]]
    assert "run_ut: step 0: error: Functional.silu.0: forward.output.0: " in caplog.text
    assert rows(tmp_path, step=1)["Functional.silu.2"][0] == "error"
    assert "tensors of further failed calls are not kept (max_bytes)" in caplog.text
    assert [path.name for path in (tmp_path / "errors").iterdir()] == ["step0"]  # 3000 bytes were full
    [folder] = (tmp_path / "errors" / "step0" / "rank0").iterdir()
    assert folder.name.startswith("ut_error_data")
    sides = [torch.load(folder / f"Functional.silu.0.forward.output.{side}.0.pt") for side in ("bench", "device")]
    assert [side.dtype for side in sides] == [torch.float64, torch.float32]
    assert torch.equal(sides[1], sides[1].bfloat16().float())  # what the training computed, not a run of ours
    assert not torch.equal(sides[0], sides[0].bfloat16().double())
    assert not list(folder.glob("Functional.linear*"))


def test_training_is_equal_to_the_bit_and_only_chosen_steps_are_checked(tmp_path):
    bare = train(make(Awkward), 2)
    debugger = start(tmp_path, steps=[1])
    watched = train(make(Awkward), 2, debugger)
    assert debugger._session.guard.failures == {}
    debugger.close()
    assert watched[0] == bare[0]
    assert all(torch.equal(watched[1][name], value) for name, value in bare[1].items())
    assert torch.equal(watched[2], bare[2])
    assert not torch.overrides._get_current_function_mode_stack()
    assert not (tmp_path / "dump" / "step0").exists()
    assert len(rows(tmp_path, step=1)) > 30


def test_files_of_a_step_are_bounded_and_calls_beyond_say_so(tmp_path, monkeypatch):
    sizes = []
    checked = step_check.StepCheck.check

    def measured(checks, *args):
        files = [file.stat() for file in checks.scratch.rglob("*.pt")]
        sizes.append(sum({file.st_ino: file.st_size for file in files}.values()))  # shared tensors are one file
        return checked(checks, *args)

    def body():
        x = torch.randn(100, 100, requires_grad=True)  # 40,000 bytes
        y = x
        for _ in range(8):
            y = y * 1.5
        y.sum().backward()

    monkeypatch.setattr(step_check.StepCheck, "check", measured)
    monkeypatch.setattr(step_check, "STEP_SECONDS", -1.0)  # no call is run here: only what is recorded counts
    found = check(tmp_path, body, max_bytes="400kB")
    assert len(found) == 9
    reasons = [row[2] for row in found.values()]
    assert [("more than 200000 bytes" in r, "took longer than" in r) for r in reasons[:3]] == [(False, True)] * 3
    assert sum("the step's forward tensors take more than 200000 bytes" in reason for reason in reasons) >= 4
    assert 200_000 <= sizes[0] <= 400_000 + 40 * 1000  # each file has a header


def test_gradients_beyond_the_bound_leave_the_forward_pass_checked(tmp_path):
    from trainsentry.collectors.torch.calls.run_ut.accuracy_task import AccuracyTask

    debugger = start(tmp_path, max_bytes=10**6)
    task: AccuracyTask = debugger._session.task
    debugger.start()
    x = torch.randn(100, 100, requires_grad=True)
    ys = [x * factor for factor in (2.0, 3.0, 4.0)]
    task._written["backward"] = 500_000 - 60_000  # room for the first gradient, not for two
    sum(ys).sum().backward()
    debugger.stop()
    assert [task.calls[f"Tensor.__mul__.{i}"] for i in range(3)] == ["", "", ""]
    assert all("backward tensors take more than 500000 bytes" in r for r in task.without_backward.values())
    assert len(task.without_backward) >= 2


@pytest.fixture
def dying_worker(monkeypatch):
    """Let the worker process die of each call."""

    def dying(settings):
        code = "import os, sys; sys.stdin.readline(); os.kill(os.getpid(), 9)"
        pipe = worker_pool.subprocess.PIPE
        return worker_pool.subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, encoding="utf-8")

    monkeypatch.setattr(worker_pool, "_start", dying)


def test_a_worker_that_dies_costs_its_call_and_accuses_nobody(tmp_path, dying_worker):
    found = check(tmp_path, lambda: torch.exp(torch.randn(3)).tanh())
    assert list(found.values()) == [["SKIP", "SKIP", "cannot be checked: its process died (signal SIGKILL)"]] * 2


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), ValueError("of ours")])
def test_a_check_that_fails_never_reaches_the_training(tmp_path, monkeypatch, caplog, fault):
    def fail(*_):
        raise fault

    monkeypatch.setattr(step_check.AccuracyTables, "new", fail)
    bare = train(make(Awkward), 3)
    debugger = start(tmp_path)
    watched = train(make(Awkward), 3, debugger)
    assert watched[0] == bare[0]
    assert debugger._session.guard.failures["run_ut"].count == 1
    assert "run_ut failed and is switched off; training goes on" in caplog.text
    debugger.close()
    assert not list((tmp_path / "dump").rglob("*.pt"))


def test_a_step_that_is_cut_off_leaves_no_tensors_behind(tmp_path):
    debugger = start(tmp_path)
    debugger.start()
    torch.exp(torch.randn(3))
    assert list((tmp_path / "dump").rglob("*.pt"))
    debugger.close()
    assert list((tmp_path / "dump").iterdir()) == []
