"""Each quantity is what its name says, compared with a computation by hand."""

from dataclasses import dataclass

import pytest
import torch
from tiny_models import EVERY_STEP, Gpt, flip_bit, mlp, train
from torch import nn

import trainsentry


def watched(model, optimizer, out, collect=None, **config):
    settings = {"output_dir": str(out), "strict": True, "collect": EVERY_STEP if collect is None else collect}
    return trainsentry.TrainMonitor({**settings, **config}).watch(model, optimizer)


def norms(monitor, quantity):
    return {name: values["norm"] for name, values in monitor.metrics(quantity).items()}


def rows_of(monitor, quantity):
    table = monitor.records()
    return table[table["quantity"] == quantity]


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_parameters_state_and_updates_are_those_of_the_step(name, out):
    model = mlp()
    optimizer = OPTIMIZERS[name](model.parameters())
    seen = {}
    optimizer.register_step_pre_hook(lambda *_: seen.update(before=snapshot(model, optimizer)))
    with watched(model, optimizer, out) as monitor:
        train(model, optimizer, 3, monitor)
        before = seen["before"]
        for parameter, (weight, gradient, state) in before.items():
            assert norms(monitor, "parameter")[parameter] == pytest.approx(weight.norm().item(), rel=1e-6)
            assert norms(monitor, "gradient")[parameter] == pytest.approx(gradient.norm().item(), rel=1e-6)
            for key, tensor in state.items():
                assert norms(monitor, key)[parameter] == pytest.approx(tensor.double().norm().item(), rel=1e-6), key
            update = dict(model.named_parameters())[parameter].detach() - weight
            got = monitor.metrics("update")[parameter]
            assert got["norm"] == pytest.approx(update.norm().item(), rel=1e-5)
            assert (got["min"], got["max"]) == pytest.approx((update.min().item(), update.max().item()), rel=1e-5)
            assert got["ratio"] == pytest.approx((update.norm() / weight.norm()).item(), rel=1e-5)


def snapshot(model, optimizer):
    def state_of(p):
        return {k: v.clone() for k, v in optimizer.state.get(p, {}).items() if isinstance(v, torch.Tensor)}

    return {n: (p.detach().clone(), p.grad.clone(), state_of(p)) for n, p in model.named_parameters()}


def test_state_has_the_optimizers_own_keys(out):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with watched(model, optimizer, out) as monitor:
        train(model, optimizer, 2, monitor)
        assert set(monitor.metrics("momentum_buffer")) == {n for n, _ in model.named_parameters()}


@dataclass
class Output:
    hidden: torch.Tensor
    rest: dict


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        out = self.inner(x, scale=torch.full((1,), 2.0))
        return out.hidden + out.rest["more"][0]


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 4)

    def forward(self, x, scale):
        y = self.fc(x) * scale
        return Output(y, {"more": [y + 1]})


def test_activations_of_nested_outputs_and_keyword_arguments_and_their_gradients(out):
    model = Nested()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = {}
    model.inner.register_forward_hook(lambda m, a, o: kept.update(hidden=o.hidden) or o.hidden.retain_grad())
    with watched(model, optimizer, out) as monitor:
        train(model, optimizer, 2, monitor)
        outputs = monitor.metrics("activation_output")
        assert {"inner.output.hidden", "inner.output.rest.more.0", "inner.fc.output.0", "output.0"} == set(outputs)
        assert outputs["inner.output.hidden"]["norm"] == pytest.approx(kept["hidden"].norm().item(), rel=1e-6)
        assert monitor.metrics("activation_input")["inner.input.scale"]["max"] == 2.0
        gradient = monitor.metrics("activation_grad_output")["inner.output.hidden"]
        assert gradient["norm"] == pytest.approx(kept["hidden"].grad.norm().item(), rel=1e-6)
        index = rows_of(monitor, "activation_output").set_index("name")["index"].to_dict()
        assert index["inner.output.rest.more.0"] == "rest.more.0"


def test_an_in_place_module_shows_its_input_as_it_was(out):
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(model, optimizer, out) as monitor:
        train(model, optimizer, 1, monitor)
        assert monitor.metrics("activation_input")["1.input.0"]["min"] < 0
        assert monitor.metrics("activation_output")["1.output.0"]["min"] == 0


def test_rows_stand_in_execution_order(out):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(model, optimizer, out) as monitor:
        train(model, optimizer, 2, monitor)
        table = monitor.records(last=1).sort_values("order")
        outputs = list(table[table["quantity"] == "activation_output"]["name"])
        gradients = list(table[table["quantity"] == "gradient"]["name"])
        assert outputs == ["0.output.0", "1.output.0", "2.output.0", "output.0"]
        assert gradients.index("2.weight") < gradients.index("0.weight")  # as the backward pass reaches them
        assert table["order"].tolist() == list(range(len(table)))


def test_micro_steps_are_told_apart_and_the_gradient_is_their_sum(out):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    collect = {**EVERY_STEP, "gradients": {"every": 1, "per_micro_step": True}}
    with watched(model, optimizer, out, collect) as monitor:
        sums = []
        for micro in range(3):
            model(torch.full((2, 8), micro + 1.0)).sum().backward()
            monitor.log(loss=float(micro))
            sums.append(model[0].weight.grad.norm().item())
        optimizer.step()
        table = monitor.records()
        out_rows = table[(table["name"] == "0.input.0") & (table["quantity"] == "activation_input")]
        assert out_rows.sort_values("micro_step")["max"].tolist() == [1.0, 2.0, 3.0]
        gradient = rows_of(monitor, "gradient")
        own = gradient[gradient["name"] == "0.weight"].sort_values("micro_step")
        assert own["micro_step"].tolist() == [0, 1, 2]
        assert own["norm"].tolist() == pytest.approx(sums, rel=1e-6)
        assert table[table["quantity"] == "loss"]["micro_step"].tolist() == [0, 1, 2]


def test_by_default_a_step_has_one_gradient_row_a_parameter(out):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(model, optimizer, out, {"activations": False}) as monitor:
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
        total = model[0].weight.grad.norm().item()
        optimizer.step()
        own = rows_of(monitor, "gradient").query("name == '0.weight'")
        assert own["norm"].tolist() == pytest.approx([total], rel=1e-6)


def test_a_gradient_that_nothing_touched_gives_no_row(out):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(model, optimizer, out, {"activations": False}) as monitor:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.step()  # no backward in between: the gradients are those of the step before
        assert rows_of(monitor, "gradient")["step"].unique().tolist() == [0]


def test_evaluation_without_gradients_is_not_training(out):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(model, optimizer, out) as monitor:
        model(torch.ones(2, 8)).sum().backward()
        with torch.no_grad():
            model(torch.full((2, 8), 50.0))
        optimizer.step()
        rows = monitor.records().query("name == 'input.0'")
        assert rows["max"].tolist() == [1.0]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recomputed_forward_is_not_a_second_call(out, use_reentrant):
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.block = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 4), nn.Tanh())

        def forward(self, x):
            return checkpoint(self.block, self.first(x), use_reentrant=use_reentrant)

    model = Checkpointed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(model, optimizer, out) as monitor:
        for _ in range(3):
            model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
        rows = rows_of(monitor, "activation_output")
        names = ["block.0.output.0", "block.1.output.0", "block.output.0", "first.output.0", "output.0"]
        for micro_step in range(3):
            part = rows[rows["micro_step"] == micro_step]
            assert sorted(part["name"]) == names
            order = part.set_index("name")["order"]
            assert order["block.output.0"] < order["output.0"]  # the first pass's row, not the recomputation's
        assert set(rows["micro_step"]) == {0, 1, 2}


def test_a_module_called_twice_in_a_pass_has_two_series(out):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            return self.fc(self.fc(x))[:, :4]

    model = Twice()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(model, optimizer, out) as monitor:
        train(model, optimizer, 1, monitor)
        assert {"fc.output.0", "fc@1.output.0"} <= set(monitor.metrics("activation_output"))


def test_targets_select(out):
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters())
    collect = {
        "gradients": {"targets": ["*.bias"]},
        "activations": {"every": 1, "targets": ["blocks.1"], "backward": False},
        "parameters": {"every": 1, "targets": ["blocks.0.attn", "ln.weight"]},
    }
    with watched(model, optimizer, out, collect) as monitor:
        train(model, optimizer, 1, monitor)
        assert all(name.endswith(".bias") for name in monitor.metrics("gradient"))
        assert all(name.startswith("blocks.1") for name in monitor.metrics("activation_output"))
        assert monitor.metrics("activation_grad_output") == {}
        attention = {f"blocks.0.attn.{m}.{p}" for m in ("qkv", "proj") for p in ("weight", "bias")}
        assert set(monitor.metrics("parameter")) == attention | {"ln.weight"}


def test_every_n_samples_the_multiples_of_n_and_leaves_no_hook_in_between(out):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    collect = {
        "gradients": {"every": 4},
        "activations": {"every": 3, "inputs": False},
        "parameters": False,
        "updates": False,
    }
    hooks = []

    def count(step):
        hooks.append(sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()))

    with watched(model, optimizer, out, collect) as monitor:
        train(model, optimizer, 9, monitor, before_step=count)
        assert sorted(set(rows_of(monitor, "gradient")["step"])) == [0, 4, 8]
        assert sorted(set(rows_of(monitor, "activation_output")["step"])) == [0, 3, 6]
    assert [bool(n) for n in hooks] == [step % 3 == 0 for step in range(9)]
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_unsampled_steps_run_no_extra_operation(out):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            Count.calls += 1
            return function(*args, **(kwargs or {}))

    def operations(monitor_it):
        torch.manual_seed(0)
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monitor = None
        if monitor_it:
            collect = {part: {"every": 100} for part in EVERY_STEP}
            monitor = watched(model, optimizer, out, collect)
        train(model, optimizer, 2)  # step 0 is sampled
        Count.calls = 0
        with Count():
            train(model, optimizer, 5)
        if monitor is not None:
            monitor.close()
        return Count.calls

    assert operations(True) == operations(False)


def test_gradients_that_a_closure_computes_are_those_of_the_step(out):
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    x = torch.randn(4, 8)

    def closure():
        optimizer.zero_grad()
        loss = model(x).pow(2).sum()
        loss.backward()
        return loss

    with watched(model, optimizer, out, {"activations": False}) as monitor:
        optimizer.step(closure)
        assert set(monitor.metrics("gradient")) == {n for n, _ in model.named_parameters()}
        assert norms(monitor, "gradient")["0.weight"] == pytest.approx(model[0].weight.grad.norm().item(), rel=1e-5)


def test_the_backward_order_and_graph_are_learned(out):
    import json

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(model, optimizer, out) as monitor:
        train(model, optimizer, 2, monitor)
        monitor.flush()
    graph = json.loads((out / "rank0" / "graph.json").read_text())
    assert graph["order"] == "execution"
    assert ["0", "1"] in graph["edges"]
    assert ["1", "2"] in graph["edges"]
    assert graph["parameters"]["0.weight"] == "0"
    assert [m["name"] for m in graph["modules"]] == ["", "0", "1", "2"]


def test_device_rows_give_the_same_records_as_host_rows(out, monkeypatch):
    """The path of accelerators, run on CPU tensors: a whole run, and no value read in a hook."""
    from trainsentry.collectors.torch import watch
    from trainsentry.collectors.torch.rows import step_rows

    def run(where, on_device):
        if on_device:
            monkeypatch.setattr(watch, "StepRows", lambda *args: step_rows.StepRows(*args, device_rows_on_cpu=True))
        torch.manual_seed(1)
        model = Gpt()
        optimizer = torch.optim.AdamW(model.parameters())
        with watched(model, optimizer, where) as monitor:
            train(model, optimizer, 3, monitor)
            return monitor.records()

    host, device = run(out / "host", on_device=False), run(out / "device", on_device=True)
    keys = ["step", "order", "name", "quantity", "micro_step"]
    assert host[keys].equals(device[keys])
    for name in ("min", "max", "nans", "infs", "zeros"):
        assert host[name].to_numpy() == pytest.approx(device[name].to_numpy(), nan_ok=True)
    assert host["norm"].to_numpy() == pytest.approx(device["norm"].to_numpy(), rel=1e-6)


def test_a_flip_in_storage_is_seen_at_the_next_sample(out):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with watched(model, optimizer, out) as monitor:
        train(model, optimizer, 2, monitor)
        flip_bit(model[2].weight, 5)
        train(model, optimizer, 1, monitor)
        values = monitor.metrics("parameter")["2.weight"]
        assert max(abs(values["max"]), abs(values["min"])) > 1e30
