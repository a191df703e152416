"""Odd models and odd use: nothing reaches the script, nothing wrong is dumped, nothing is left behind."""

import copy
import gc
import json
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from debugged import Tower, make, read
from torch import nn
from typer.testing import CliRunner

from trainsentry import PrecisionDebugger
from trainsentry.collectors.torch.calls.replay_call import replay
from trainsentry.collectors.torch.saving import load_tensor
from trainsentry.monitor.cli.app import app


def start(tmp_path, model=None, task="tensor", level="mix"):
    debugger = PrecisionDebugger(task=task, level=level, dump_path=str(tmp_path))
    debugger.start(model)
    return debugger


def end(debugger, tmp_path):
    debugger.stop()
    debugger.step()
    assert debugger._session.guard.failures.keys() <= {"debugger (several backward passes)"}
    return read(tmp_path / "step0" / "rank0")["dump"]["data"]


class Uses(nn.Module):
    """Calls a function of its inputs."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def test_a_gradient_with_a_sparse_and_a_dense_part(tmp_path):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Uses(lambda w, i: (w * 2).sum() + F.embedding(i, w, sparse=True).sum())

        def forward(self, w, i):
            return self.inner(w, i)

    model, w = Model(), torch.ones(3, 2, requires_grad=True)
    debugger = start(tmp_path, model, level="L0")
    model(w, torch.tensor([0])).backward()
    data = end(debugger, tmp_path)
    assert data["Module.inner.Uses.backward.0"]["output"][0]["Max"] == 3.0


def test_scripted_and_traced_parts_are_passed_by(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)))
    debugger = start(tmp_path, model)
    model(torch.ones(1, 2)).sum().backward()
    assert "Module.0.Linear.forward.0" in end(debugger, tmp_path)
    assert not model[0]._forward_hooks


def test_a_model_can_be_copied_and_saved_while_a_range_is_counted(tmp_path):
    model = make(Tower)
    debugger = PrecisionDebugger(task="statistics", level="L0", dump_path=str(tmp_path / "d"))
    debugger.start(model, token_range=[0, 1])
    copied = copy.deepcopy(model)
    torch.save(model, tmp_path / "model.pt")
    assert torch.equal(copied(torch.ones(1, 4)), model(torch.ones(1, 4)))
    debugger.stop()


def test_the_default_device_can_be_set_meanwhile(tmp_path):
    try:
        torch.set_default_device("cpu")
        debugger = start(tmp_path, make(Tower))
        torch.set_default_device("meta")
        torch.set_default_device("cpu")
        assert "Torch.relu.0.forward" not in end(debugger, tmp_path)
    finally:
        torch.set_default_device(None)
    assert torch.overrides._len_torch_function_stack() == 0


@pytest.mark.parametrize("stopped", [False, True])
def test_a_gradient_penalty_leaks_no_graph(tmp_path, stopped):
    model = nn.Sequential(Uses(lambda x: x.exp() * (2 * x).exp()))
    debugger = start(tmp_path, model, task="statistics", level="L0")
    alive = []
    for _ in range(3):
        x = torch.ones(2, requires_grad=True)
        out = model(x)
        if stopped:
            debugger.stop()
        [g] = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        alive.append(weakref.ref(x))
        del x, out, g
        debugger.start(model)
    debugger.stop()
    debugger.step()
    gc.collect()
    assert [r() is not None for r in alive] == [False] * 3


def test_a_file_with_two_names_is_not_written_through_one_of_them(tmp_path):
    w = torch.randn(4, 4, requires_grad=True)
    debugger = start(tmp_path, level="L1")
    h = F.linear(torch.ones(2, 4), w)
    r = F.gelu(h)
    r.sum().backward(retain_graph=True)
    torch.autograd.grad(r.sum() * 100, h)
    data = end(debugger, tmp_path)
    folder = tmp_path / "step0" / "rank0" / "dump_tensor_data"
    [facts] = data["Functional.linear.0.backward"]["input"]
    assert load_tensor(folder / facts["data_name"]).max().item() == pytest.approx(facts["Max"])
    text = (tmp_path / "step0" / "rank0" / "dump.json").read_text()
    assert text.count('"Functional.gelu.0.backward"') == 1


def test_a_weight_whose_data_was_exchanged_is_read_anew(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2))
    debugger = start(tmp_path, model, level="L0")
    model(torch.ones(1, 2))
    model[0].weight.data = torch.full((2, 2), 7.0)
    model(torch.ones(1, 2))
    data = end(debugger, tmp_path)
    facts = data["Module.0.Linear.forward.1"]["parameters"]["weight"]
    assert facts["Max"] == 7.0
    assert load_tensor(tmp_path / "step0" / "rank0" / "dump_tensor_data" / facts["data_name"]).max() == 7.0


class Greedy(torch.autograd.Function):
    """Changes the gradient that it is given."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, g):
        return g.mul_(10)


def test_a_gradient_is_dumped_as_it_came(tmp_path):
    model = nn.Sequential(Uses(Greedy.apply))
    debugger = start(tmp_path, model, level="L0")
    (model(torch.ones(2, requires_grad=True)) * 2).sum().backward()
    data = end(debugger, tmp_path)
    assert data["Module.0.Uses.backward.0"]["input"][0]["Max"] == 2.0
    assert data["Module.0.Uses.backward.0"]["output"][0]["Max"] == 20.0


def test_calls_on_two_threads_keep_their_own_outputs(tmp_path):
    first_is_in, second_is_done = threading.Event(), threading.Event()

    def slow(x):
        if x.max() == 1:
            first_is_in.set()
            second_is_done.wait(10)
        return x * 2

    model = nn.Sequential(Uses(slow))
    debugger = start(tmp_path, model, level="L0")
    thread = threading.Thread(target=lambda: model(torch.ones(1)))
    thread.start()
    first_is_in.wait(10)
    model(torch.full((1,), 5.0))
    second_is_done.set()
    thread.join()
    data = end(debugger, tmp_path)
    pairs = {(c["input_args"][0]["Max"], c["output"][0]["Max"]) for c in data.values()}
    assert pairs == {(1.0, 2.0), (5.0, 10.0)}


def test_an_operation_that_fails_leaves_nothing_open(tmp_path):
    import math as package

    def broken(x):
        raise RuntimeError("mine")

    package.broken = broken
    debugger = start(tmp_path, level="L1")
    debugger.register_custom_api(package, "broken")
    for call in (lambda: package.broken(torch.ones(1)), lambda: torch.ones(2) @ torch.ones(3)):
        with pytest.raises(RuntimeError):
            call()
    assert PrecisionDebugger._session.watcher._calls_here == []
    debugger.restore_custom_api(package, "broken")
    torch.ones(2) + 1
    assert list(end(debugger, tmp_path)) == ["Tensor.__add__.0.forward"]


def test_a_leaf_of_an_odd_layout_costs_its_gradient_only(tmp_path):
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], requires_grad=True)
    debugger = start(tmp_path, level="L1", task="statistics")
    nested * 2
    (torch.ones(2, requires_grad=True) * 2).sum().backward()
    assert "Tensor.__mul__.1.backward" in end(debugger, tmp_path)


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.func.grad(lambda x: torch.relu(x).sum())(torch.randn(4)),
        lambda: torch.func.jvp(lambda x: torch.relu(x) * 2, (torch.randn(4),), (torch.ones(4),)),
        lambda: torch.func.vmap(torch.relu)(torch.randn(4, 2)),
        lambda: torch.relu(torch._efficientzerotensor(3)),
    ],
)
def test_tensors_without_an_address_cost_nothing_but_their_numbers(tmp_path, call):
    debugger = start(tmp_path, level="L1", task="statistics")
    call()
    torch.sigmoid(torch.ones(2))
    found = end(debugger, tmp_path)
    assert found["Torch.sigmoid.0.forward"]["input_args"][0]["Max"] == 1.0
    assert "Torch.relu.0.forward" in found


def test_a_name_in_a_dump_calls_operations_only(tmp_path):
    marker = tmp_path / "saved"
    entry = {"input_args": [{"type": "int", "value": 1}, {"type": "str", "value": str(marker)}], "output": []}
    for call in ("Torch.save.0.forward", "Torch.load.0.forward", "Functional.handle_torch_function.0.forward"):
        verdict, why = replay(call, entry, None, tmp_path)
        assert (verdict, "cannot be replayed" in why) == ("unknown", True)
    assert not marker.exists()


def test_a_complex_result_is_judged_by_its_size(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"task": "overflow_check", "dump_path": str(tmp_path / "d"), "level": "L1"}))
    debugger = PrecisionDebugger(str(path))
    debugger._session.overflows.limit = -1
    debugger.start()
    x = torch.full((2,), 3e38, dtype=torch.complex64)
    x * x
    debugger.stop()
    debugger.step()
    result = CliRunner().invoke(app, ["overflow", str(tmp_path / "d")])
    assert "verdict: normal" in result.stdout
