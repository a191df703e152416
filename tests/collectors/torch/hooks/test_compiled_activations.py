"""A compiled model gives the same rows and results as an eager one, with at most two graphs for each graph."""

import logging
import shutil

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import trainsentry
from trainsentry.collectors.torch.hooks.compiler import TRACES_GRADIENTS

KEY = ["step", "quantity", "name", "micro_step"]


class Residual(nn.Module):
    def __init__(self, *, checkpointed=False):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)
        self.checkpointed = checkpointed

    def inner(self, x):
        return self.fc2(self.act(self.fc1(x)))

    def forward(self, x, *, scale=1.0):
        y = checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)
        return {"x": x + y * scale}


class Net(nn.Module):
    """Calls one block twice, with a keyword, and takes a dictionary from it."""

    def __init__(self, *, checkpointed=False):
        super().__init__()
        self.block, self.head = Residual(checkpointed=checkpointed), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.block(self.block(x)["x"], scale=0.5)["x"])


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def graphs():
    return counters["stats"]["unique_graphs"]


def train(model, forward, optimizer, steps, *, passes=1, evaluate=False, after_step=None):
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        for _ in range(passes):
            loss = forward(torch.randn(5, 8, generator=generator)).square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if evaluate:
            with torch.no_grad():
                forward(torch.randn(5, 8, generator=generator))
        if after_step is not None:
            after_step()
    return losses, [p.detach().clone() for p in model.parameters()]


def run(out, compiler, *, every=2, monitored=True, checkpointed=False, steps=10, collect=None, **training):
    torch.manual_seed(0)
    model = Net(checkpointed=checkpointed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if not monitored:
        return None, train(model, compiler(model), optimizer, steps, **training)
    collect = collect or {"activations": {"every": every}, "gradients": {"every": 1}}
    config = {"output_dir": str(out), "collect": collect, "strict": True, "on_incident": False}
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        trained = train(model, compiler(model), optimizer, steps, **training)
        return monitor.records(), trained


def compiled(backend):
    return lambda model: torch.compile(model, fullgraph=True, backend=backend)


def visible(records):
    """Return what this torch shows of a graph: gradients of activations inside it only from 2.13 on.

    Calls are looked at again, inputs read at every step and writes of gradients counted outside of graphs alone.
    """
    records = records[~records.quantity.str.startswith(("recomputed", "euler_gap", "gradient_writes"))]
    return records if TRACES_GRADIENTS else records[~records.quantity.str.startswith("activation_grad")]


def assert_same_rows(one, other, rtol=0.0):
    one, other = visible(one), visible(other)
    one, other = one.set_index(KEY).sort_index(), other.set_index(KEY).sort_index()
    assert list(one.index) == list(other.index)
    for statistic in ("min", "max", "mean", "norm", "nans", "infs", "zeros"):
        np.testing.assert_allclose(one[statistic], other[statistic], rtol=rtol, atol=rtol, err_msg=statistic)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_rows_of_a_compiled_model_are_those_of_an_eager_one(tmp_path, checkpointed):
    training = {"passes": 2, "evaluate": True, "checkpointed": checkpointed}
    eager, trained = run(tmp_path / "eager", lambda model: model, **training)
    graph, trained_compiled = run(tmp_path / "graph", compiled("aot_eager"), **training)
    assert trained[0] == trained_compiled[0]
    assert_same_rows(graph, eager)
    seen = set(graph.quantity)
    assert {"activation_input", "activation_output"} <= seen
    assert ({"activation_grad_input", "activation_grad_output"} <= seen) == TRACES_GRADIENTS
    assert "block@1.output.x" in set(graph.name)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.skipif(" " in torch.__file__, reason="inductor cannot link in a folder with a space in its name")
def test_inductor_shows_the_same_rows_where_that_is_asked_for(tmp_path):
    collect = {"activations": {"every": 1, "inside_graphs": True}, "gradients": {"every": 1}}
    eager, _ = run(tmp_path / "eager", lambda model: model, every=1, steps=4, passes=2)
    graph, _ = run(tmp_path / "graph", compiled("inductor"), steps=4, passes=2, collect=collect)
    assert_same_rows(graph, eager, rtol=1e-5)


def test_sampling_that_is_toggled_compiles_one_more_graph_and_misses_no_step(tmp_path):
    counted = []
    records, _ = run(tmp_path, compiled("eager"), steps=12, after_step=lambda: counted.append(graphs()))
    assert sorted(set(records[records.quantity == "activation_output"].step)) == [0, 2, 4, 6, 8, 10]
    assert counted[1] <= 2 * counted[0]  # one with sampling, one without
    assert set(counted[1:]) == {counted[1]}


def test_two_losses_before_one_backward_pass(tmp_path):
    """Two forwards, then two backwards: nothing of ours may be saved in one and changed by the other."""

    def both(out, compiler):
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with trainsentry.TrainMonitor({"output_dir": str(out), "strict": True}).watch(model, optimizer) as monitor:
            forward = compiler(model)
            for _ in range(3):
                losses = [forward(torch.randn(5, 8)).square().mean() for _ in range(2)]
                for loss in losses:
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            return monitor.records()

    assert_same_rows(both(tmp_path / "graph", compiled("aot_eager")), both(tmp_path / "eager", lambda model: model))


def test_without_activations_the_graph_is_the_users_own(tmp_path):
    collect = {
        "activations": False,
        "gradients": {"every": 1},
        "optimizer_state": {"every": 1},
        "updates": {"every": 1},
    }
    bare_graphs = []
    run(None, compiled("eager"), monitored=False, steps=3, after_step=lambda: bare_graphs.append(graphs()))
    torch._dynamo.reset()
    counters.clear()
    counted = []
    records, _ = run(tmp_path, compiled("eager"), collect=collect, steps=3, after_step=lambda: counted.append(graphs()))
    assert counted == bare_graphs
    assert counters["graph_break"] == {}
    assert {"gradient", "parameter", "exp_avg", "update"} <= set(records.quantity)


def test_a_block_that_is_compiled_inside_an_eager_model(tmp_path):
    def one_block(model):
        model.block.compile(fullgraph=True, backend="aot_eager")
        return model

    eager, _ = run(tmp_path / "eager", lambda model: model, passes=2)
    graph, _ = run(tmp_path / "graph", one_block, passes=2)
    assert_same_rows(graph, eager)


def test_a_compiled_optimizer_is_read(tmp_path):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    with trainsentry.TrainMonitor({"output_dir": str(tmp_path), "strict": True}).watch(model, optimizer) as monitor:
        optimizer.step = torch.compile(optimizer.step, backend="aot_eager")
        train(model, model, optimizer, 3)
        assert set(monitor.records().step) == {0, 1, 2}
        assert "block.fc1.weight" in monitor.metrics("gradient")


@pytest.mark.parametrize("late", [False, True])
def test_a_model_that_was_compiled_first_is_told_of_in_plain_words(tmp_path, caplog, late):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    forward = model if late else torch.compile(model, backend="aot_eager")
    if not late:
        train(model, forward, optimizer, 1)
    with (
        caplog.at_level(logging.WARNING, "trainsentry"),
        trainsentry.TrainMonitor(
            {"output_dir": str(tmp_path), "collect": {"activations": {"every": 2}}, "strict": True}
        ).watch(model, optimizer) as monitor,
    ):
        if late:
            train(model, model, optimizer, 1)
            forward = torch.compile(model, backend="aot_eager")
        train(model, forward, optimizer, 5)
        assert "block.fc1.weight" in monitor.metrics("gradient")
    told = [r.message for r in caplog.records if "call watch() first, then torch.compile" in r.message]
    assert len(told) == 1


@pytest.mark.parametrize("root", [0, 1], ids=["no inputs", "inputs"])
def test_an_eager_model_keeps_the_roots_hook_at_most_on_steps_that_are_not_sampled(tmp_path, root):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    config = {"output_dir": str(tmp_path), "start_step": 1}
    config["collect"] = {"activations": {"every": 3, "inputs": bool(root)}}
    counts = []

    def count():
        counts.append(sum(len(m._forward_hooks) for m in model.modules()))

    with trainsentry.TrainMonitor(config).watch(model, optimizer):
        train(model, model, optimizer, 8, after_step=count)
    modules = len(list(model.modules()))
    # hooks of the step to come; the first step is hooked to learn what is compiled
    assert counts == [root, root, modules, root, root, modules, root, root]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
