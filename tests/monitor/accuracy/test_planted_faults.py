"""A clean model passes whole, in each dtype and with dumped and random tensors; an operation made worse is named."""

import pytest
import torch
import torch.nn.functional as F
from checked import check, dumped, tables
from debugged import Awkward, Encoder, Tower


class Half(Tower):
    """A tower in bfloat16."""

    def __init__(self):
        super().__init__(width=32)
        self.bfloat16()

    def forward(self, x):
        return super().forward(x.bfloat16()).float()


class Autocast(Tower):
    """A tower under autocast."""

    def __init__(self):
        super().__init__(width=32)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


@pytest.mark.parametrize("task", ["statistics", "tensor"])
@pytest.mark.parametrize("kind", [Awkward, Encoder, Half, Autocast])
def test_a_clean_model_passes_whole(tmp_path, kind, task):
    summary = check(dumped(tmp_path, kind, task=task), tmp_path / "out")
    assert summary.is_clean
    assert [(c.call, c.message) for c in summary.calls if c.status != "pass"] == []
    assert summary.passed > 25
    results, _ = tables(summary)
    assert {row["Backward Test Success"] for row in results.values()} == {"pass", " "}


def lossy(function):
    """Return a function that computes float32 in bfloat16."""

    def worse(x, *args, **kwargs):
        if x.dtype is not torch.float32:
            return function(x, *args, **kwargs)
        lower = [a.bfloat16() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
        return function(x.bfloat16(), *lower, **kwargs).float()

    return worse


@pytest.mark.parametrize(
    ("home", "name"),
    [(F, "gelu"), (F, "linear"), (F, "layer_norm"), (torch.Tensor, "__add__"), (torch.Tensor, "square")],
)
@pytest.mark.parametrize("task", ["statistics", "tensor"])
def test_an_operation_that_loses_precision_is_named_and_no_other(tmp_path, monkeypatch, home, name, task):
    dump = dumped(tmp_path, Tower, task=task)
    monkeypatch.setattr(home, name, lossy(getattr(home, name)))
    summary = check(dump, tmp_path / "out")
    failed = {c.call.split(".")[1] for c in summary.failures}
    assert failed == {name}
    calls = [c for c in summary.calls if c.call.split(".")[1] == name]
    assert {c.forward for c in calls} == {"error"}
    excess = [c.excess for c in summary.failures]
    assert excess == sorted(excess, reverse=True)
    assert excess[-1] > 1


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.nn.functional.silu(x)

    @staticmethod
    def backward(ctx, gradient):
        [x] = ctx.saved_tensors
        s = torch.sigmoid(x)
        wrong = 1.01 if x.dtype is torch.float32 else 1.0
        return gradient * (s + x * s * (1 - s)) * wrong


def test_a_wrong_backward_pass_is_told_from_a_wrong_forward_pass(tmp_path, monkeypatch):
    dump = dumped(tmp_path, Encoder)
    silu, inner = F.silu, []

    def replaced(x, **_):
        if inner:
            return silu(x)
        inner.append(x)
        try:
            return WrongGradient.apply(x)
        finally:
            inner.pop()

    monkeypatch.setattr(F, "silu", replaced)
    [found] = check(dump, tmp_path / "out").failures
    assert (found.call, found.forward, found.backward) == ("Functional.silu.0", "pass", "error")
    assert found.message.startswith("backward.output.0: benchmark: ")


def test_the_rule_of_run_ut_lets_small_results_pass_which_the_standards_do_not(tmp_path, monkeypatch):
    dump = dumped(tmp_path, Tower)
    monkeypatch.setattr(F, "layer_norm", lambda x, *a, f=F.layer_norm, **k: f(x, *a, **k) * _factor(x, 1 + 1e-4))
    assert check(dump, tmp_path / "a", rule="run_ut").failures == []
    assert {c.call for c in check(dump, tmp_path / "b").failures} >= {"Functional.layer_norm.0"}


def _factor(x, factor):
    return factor if x.dtype is torch.float32 else 1.0


def test_a_call_that_only_the_device_refuses_is_an_error(tmp_path, monkeypatch):
    dump = dumped(tmp_path, Tower)

    def refuse(x, *args, f=F.gelu, **kwargs):
        if x.dtype is torch.float32:
            raise RuntimeError("no such kernel\nmore")
        return f(x, *args, **kwargs)

    monkeypatch.setattr(F, "gelu", refuse)
    summary = check(dump, tmp_path / "out")
    assert {c.call for c in summary.failures} == {"Functional.gelu.0", "Functional.gelu.1"}
    assert summary.failures[0].message == "the device refuses the call: RuntimeError: no such kernel"


def test_the_tensors_of_failed_calls_are_saved(tmp_path, monkeypatch):
    dump = dumped(tmp_path, Tower)
    monkeypatch.setattr(F, "gelu", lossy(F.gelu))
    summary = check(dump, tmp_path / "out", save_errors=True)
    [folder] = (tmp_path / "out").glob("ut_error_data*")
    names = {path.name for path in folder.iterdir()}
    assert {name.split(".")[1] for name in names} == {"gelu"}
    bench = torch.load(folder / "Functional.gelu.0.forward.output.bench.0.pt", weights_only=True)
    device = torch.load(folder / "Functional.gelu.0.forward.output.device.0.pt", weights_only=True)
    assert (bench.dtype, device.dtype) == (torch.float64, torch.float32)
    [row] = [r for name, r in tables(summary)[1].items() if name == "Functional.gelu.0.forward.output.0"]
    assert float(row["最大绝对误差"]) == pytest.approx(float((bench - device).abs().max()), abs=1e-13)
