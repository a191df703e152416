"""free_benchmark finds results that a small change overturns, and leaves the training as it is."""

import csv
import gc
import json
import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from debugged import Awkward, Tower, make, train

from trainsentry import ConfigError, PrecisionDebugger
from trainsentry.collectors.calls.free_benchmark import (
    COLUMNS,
    BenchmarkSettings,
    BenchmarkTable,
    RatioThresholds,
    ResultDifference,
)
from trainsentry.collectors.torch.calls.free_benchmark import comparison
from trainsentry.collectors.torch.calls.free_benchmark.perturbations import NOISE, perturbed

MODES = ["improve_precision", "add_noise", "bit_noise", "change_value", "no_change", "to_cpu"]


def benchmark(tmp_path, body, steps=1, functions=(), **settings):
    """Run `body` under the task; return the table's rows as mappings, and the watcher."""
    path = tmp_path / "config.json"
    if settings.get("pert_mode") == "to_cpu" and "fuzz_device" not in settings:
        settings["fuzz_device"] = "cpu"
    whole = {"task": "free_benchmark", "dump_path": str(tmp_path / "out"), "free_benchmark": settings}
    path.write_text(json.dumps(whole))
    debugger = PrecisionDebugger(str(path))
    watcher = debugger._session.watcher
    for name, function in functions:
        setattr(math, name, function)
        debugger.register_custom_api(math, name)
    try:
        for _ in range(steps):
            debugger.start()
            body()
            debugger.stop()
            debugger.step()
        assert debugger._session.guard.failures == {}
    finally:
        for name, _ in functions:
            debugger.restore_custom_api(math, name)
            delattr(math, name)
        debugger.close()
    table = tmp_path / "out" / "free_benchmark.csv"
    return (list(csv.DictReader(table.open())) if table.exists() else []), watcher


def autocast_training(debugger=None):
    model = make(Tower)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(2):
        if debugger is not None:
            debugger.start(model)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.ones(3, 4)).float().square().mean() + F.dropout(model.first.weight).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if debugger is not None:
            debugger.stop()
            debugger.step()
        losses.append(loss.item())
    return losses, model.state_dict(), torch.get_rng_state()


@pytest.mark.parametrize("stage", ["forward", "backward"])
@pytest.mark.parametrize("mode", MODES)
def test_training_is_equal_to_the_bit(tmp_path, mode, stage):
    for number, run in enumerate((lambda d=None: train(make(Awkward), 2, d), autocast_training)):
        bare = run()
        settings = {"pert_mode": mode, "fuzz_stage": stage, "fuzz_device": "cpu" if mode == "to_cpu" else "npu"}
        path = tmp_path / f"{number}.json"
        whole = {"task": "free_benchmark", "dump_path": str(tmp_path / "out"), "free_benchmark": settings}
        path.write_text(json.dumps(whole))
        debugger = PrecisionDebugger(str(path))
        watched = run(debugger)
        assert debugger._session.guard.failures == {}
        done = debugger._session.watcher
        debugger.close()
        assert watched[0] == bare[0]
        assert all(torch.equal(watched[1][name], value) for name, value in bare[1].items())
        assert torch.equal(watched[2], bare[2])
        assert not any("failed" in reason for reason in done.left_out)
        assert done.checked or (mode == "improve_precision" and not number)


def test_hooks_on_saved_tensors_do_not_see_the_repetition(tmp_path):
    w = torch.ones(3, 3, requires_grad=True)
    packed = []

    def body():
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t, lambda t: t):
            (w @ w).exp().sum().backward()

    body()
    bare = len(packed)
    _, done = benchmark(tmp_path, body, pert_mode="add_noise")
    assert (len(packed), done.checked) == (2 * bare, 3)


@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_no_tensor_is_kept_once_the_program_has_done_with_it(tmp_path, stage):
    alive = []

    def body():
        x = torch.ones(4, requires_grad=True)
        y = x * 2
        y.sum().backward()
        alive.extend([weakref.ref(x), weakref.ref(y)])

    benchmark(tmp_path, body, pert_mode="no_change", fuzz_stage=stage)
    gc.collect()
    assert [r() is not None for r in alive] == [False, False]


def test_a_call_that_differs_from_time_to_time_has_a_row(tmp_path):
    times = iter(range(1, 100))
    rows, _ = benchmark(
        tmp_path,
        lambda: math.unsteady(torch.ones(2, 3)),
        steps=2,
        functions=[("unsteady", lambda x: x * next(times))],
        pert_mode="no_change",
    )
    assert tuple(rows[0]) == COLUMNS
    assert [(r["step"], r["api_name"], r["shape"]) for r in rows] == [(n, "math.unsteady.0", "[2, 3]") for n in "01"]
    assert [float(r["max_rel"]) for r in rows] == pytest.approx([1.0, 4 / 3 - 1])
    assert (rows[0]["rank"], rows[0]["pert_mode"], rows[0]["stage"]) == ("0", "no_change", "forward")


def test_a_backward_pass_that_differs_has_a_row(tmp_path):
    times = iter(range(1, 100))

    class Unsteady(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, g):
            return g * next(times)

    def body():
        x = torch.ones(2, requires_grad=True)
        (math.unsteady(x) * 2).sum().backward()

    settings = {"pert_mode": "no_change", "fuzz_stage": "backward"}
    rows, done = benchmark(tmp_path, body, functions=[("unsteady", Unsteady.apply)], **settings)
    assert [(r["stage"], r["api_name"], r["max_rel"]) for r in rows] == [("backward", "math.unsteady.0", "1.0")]
    assert done.checked == 3


def lossy(x):
    return (x + 256) - 256


@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_what_half_precision_loses_is_found_by_a_higher_one(tmp_path, stage):
    torch.manual_seed(0)
    x = torch.rand(64, dtype=torch.bfloat16).requires_grad_()
    w = torch.rand(8, 64, dtype=torch.bfloat16).requires_grad_()

    def body():
        (F.linear(x, w).sum() + math.lossy(x).sum()).backward()

    rows, done = benchmark(tmp_path, body, functions=[("lossy", lossy)], fuzz_stage=stage)
    assert {r["api_name"] for r in rows} == ({"math.lossy.0"} if stage == "forward" else set())
    assert done.checked >= 4


def test_fix_hands_on_the_more_exact_result_with_its_gradient_in_the_dtype_that_is_expected(tmp_path):
    torch.manual_seed(0)
    x = torch.rand(64, dtype=torch.bfloat16).requires_grad_()
    found = {}

    def body():
        y = math.lossy(x)
        view = y.view(8, 8)
        view.data.add_(0)
        found.update(y=y, same=view.data_ptr() == y.data_ptr())
        (y * 3).sum().backward()

    rows, done = benchmark(tmp_path, body, functions=[("lossy", lossy)], handler_type="fix")
    assert found["y"].dtype is torch.bfloat16
    assert torch.equal(found["y"], lossy(x.detach().float()).bfloat16())
    assert not torch.equal(found["y"], lossy(x.detach()))
    assert found["same"]
    assert torch.equal(x.grad, torch.full_like(x, 3.0))
    assert (rows, done.left_out["that return a view"]) == ([], 1)


def test_only_the_calls_that_are_asked_for_are_repeated(tmp_path):
    def body():
        x = torch.rand(4)
        x * 2
        torch.exp(x)
        torch.exp(x)
        x - 1

    for chosen, count in (({"list": ["exp"]}, 2), ({"scope": ["Torch.exp.1.forward", "Tensor.__sub__.0.forward"]}, 2)):
        _, done = benchmark(tmp_path, body, pert_mode="no_change", **chosen)
        assert done.checked == count


def test_a_function_that_changes_its_argument_unnoticed_does_so_once(tmp_path):
    def sly(x):
        x.data.add_(0)
        torch.Tensor.add_(x, 1)
        return x * 2

    x = torch.zeros(3)
    _, done = benchmark(
        tmp_path, lambda: [math.sly(x) for _ in range(3)], functions=[("sly", sly)], pert_mode="no_change"
    )
    assert x.tolist() == [3.0] * 3
    assert (done.checked, done.left_out["that change their arguments"]) == (2, 1)


@pytest.mark.parametrize("dtype", NOISE)
@pytest.mark.parametrize("mode", ["add_noise", "bit_noise"])
def test_noise_changes_every_number_that_is_large_enough_and_makes_none_infinite(mode, dtype):
    info = torch.finfo(dtype)
    x = torch.tensor([0.3, -3.0, 100.0, -12345.0, info.max, info.min, 0.0, torch.nan, torch.inf], dtype=dtype)
    [changed], _ = perturbed(mode, (x,), {}, autocast=False)
    assert (changed[:6] != x[:6]).all()
    assert torch.isfinite(changed[:7]).all()
    assert changed[6] == 0
    assert changed[7].isnan()
    assert changed[8] == torch.inf
    zeros = torch.zeros(3, dtype=dtype)
    assert perturbed(mode, (zeros,), {}, autocast=False) is None


A = torch.linspace(1, 2, 100)


@pytest.mark.parametrize("place", [0, 50, 99])
@pytest.mark.parametrize(
    ("value", "found"),
    [(100.0, "ratio"), (-1.5, "symbol_flipping"), (torch.nan, "nan"), (torch.inf, "ratio"), (None, "equal")],
)
def test_every_element_counts(monkeypatch, place, value, found):
    monkeypatch.setattr(comparison, "CHUNK", 16)
    other = A.clone()
    if value is not None:
        other[place] = value
    for one, two in ((A, other), (other, A)):
        seen = comparison.difference("add_noise", "forward", one, two)
        assert seen.word == (found if found in {"symbol_flipping", "nan"} else "")
        assert (seen.ratio > 1.0002) == (found != "equal")


def test_nan_and_infinities_on_both_sides_are_equal():
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0])
    assert comparison.difference("no_change", "forward", x, x.clone()) == ResultDifference(1.0)
    assert comparison.difference("no_change", "forward", x, -x).word == "symbol_flipping"
    assert comparison.difference("no_change", "forward", x, x * (1 + 1e-7)).ratio > 1.0


def test_a_device_is_held_against_the_cpu_by_size_and_by_balance():
    x = torch.linspace(1, 100, 50)
    assert comparison.agrees_with_cpu(x, x * (1 + 2**-16), torch.float32)[0]
    assert not comparison.agrees_with_cpu(x, x * (1 + 2**-13), torch.float32)[0]
    assert not comparison.agrees_with_cpu(x.half(), x.half().float() * (1 + 2**-12), torch.float16)[0]  # all one way
    away = torch.tensor([1, -1] * 25)
    assert comparison.agrees_with_cpu(x.half(), x.half().float() * (1 + away * 2**-12), torch.float16)[0]


def settings_of(folder, **given):
    usual = {"mode": "add_noise", "fixes": False, "stage": "forward", "preheats": True}
    return BenchmarkSettings(**{"rank": 0, "folder": folder, "preheat_steps": 2, "max_samples": 3, **usual, **given})


def test_preheating_moves_a_threshold_until_it_holds(tmp_path):
    thresholds = RatioThresholds(settings_of(tmp_path))
    assert thresholds.of("f", "float32") == 2.05
    for _ in range(30):
        thresholds.learn("f", "float32", ResultDifference(1.01), cpu_agrees=True)
    assert 1.01 <= thresholds.of("f", "float32") < 1.02
    thresholds.learn("f", "float32", ResultDifference(1.5), cpu_agrees=True)
    assert thresholds.of("f", "float32") > 1.02
    for _ in range(30):
        thresholds.learn("g", "float32", ResultDifference(1.0), cpu_agrees=True)
    assert thresholds.of("g", "float32") == 1.0002
    assert [thresholds.takes_sample(0, "f") for _ in range(5)] == [True] * 3 + [False] * 2
    assert thresholds.takes_sample(1, "f")


def test_while_it_preheats_no_row_is_written(tmp_path):
    def body():
        x = torch.rand(64)
        torch.exp(x) - torch.exp(x.flip(0))

    settings = {"pert_mode": "change_value", "if_preheat": True, "preheat_step": 2}
    rows, _ = benchmark(tmp_path, body, steps=4, **settings)
    assert {r["step"] for r in rows} == {"2", "3"}


def test_ranks_share_one_table_with_one_header(tmp_path):
    for rank in (0, 1):
        BenchmarkTable(settings_of(tmp_path, rank=rank)).add(
            3, "Torch.exp.0", ResultDifference(1.5), ("torch.float16", [2], 0)
        )
    lines = (tmp_path / "free_benchmark.csv").read_text().splitlines()
    assert lines == [
        ",".join(COLUMNS),
        *(f"{r},add_noise,forward,3,Torch.exp.0,0.5,torch.float16,[2],0" for r in (0, 1)),
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fuzz_device": "cpu"}, "pert_mode: 'improve_precision' with fuzz_device 'cpu'; allowed: to_cpu"),
        ({"pert_mode": "to_cpu"}, "pert_mode: 'to_cpu' with fuzz_device 'npu'; allowed: improve_precision"),
        ({"pert_mode": "louder"}, "pert_mode: got 'louder'"),
        ({"handler_type": "fix", "fuzz_stage": "backward"}, "fuzz_stage: 'backward' with handler_type 'fix'"),
        ({"handler_type": "fix", "if_preheat": True}, "if_preheat: true with handler_type 'fix'"),
        ({"handler_type": "fix", "pert_mode": "add_noise"}, "pert_mode: 'add_noise' with handler_type 'fix'"),
        ({"pert_mode": "no_change", "if_preheat": True}, "if_preheat: true"),
        ({"fuzz_level": "L0"}, "fuzz_level: got 'L0'"),
        ({"preheat_step": 0}, "preheat_step: got 0"),
        ({"list": ["a"], "scope": ["Torch.exp.0.forward"]}, "are both given"),
    ],
)
def test_combinations_without_a_meaning_are_refused(tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        benchmark(tmp_path, lambda: None, **{"fuzz_device": "npu", **settings})


def test_modules_are_not_repeated(tmp_path):
    with pytest.raises(ConfigError, match="level: 'L0' with task 'free_benchmark'; allowed: L1"):
        PrecisionDebugger(task="free_benchmark", level="L0", dump_path=str(tmp_path))
