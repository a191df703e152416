"""One module a sampled step is computed again: a device that computes wrongly shows, and training does not change."""

import contextlib
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import trainsentry
from trainsentry.collectors.guard import Guard
from trainsentry.collectors.series import Series, SeriesTable
from trainsentry.collectors.statistics import VALUE
from trainsentry.collectors.torch.hooks import repeated_calls
from trainsentry.collectors.torch.passes import operation_nodes
from trainsentry.collectors.torch.rows.step_rows import StepRows

gradients_too = pytest.mark.skipif(
    not operation_nodes.TELLS_DEFAULT_HOOKS, reason="this torch does not tell of hooks of saved tensors"
)


@pytest.fixture(autouse=True)
def no_compiled_backward(monkeypatch):
    """Another test of this process may have compiled one, after which no gradients are computed again."""
    monkeypatch.setattr(repeated_calls, "backward_is_compiled", lambda: False)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(16), nn.Linear(16, 4))


def train(tmp_path, model, steps=40, *, recompute=True, autocast=False, step_hook=lambda step: None):
    """Train; return losses, the rows of calls that were computed again, and the incidents."""
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    collect = {"activations": {"every": 1, "recompute": recompute}}
    config = {"output_dir": str(tmp_path), "strict": True, "collect": collect, "on_incident": {"dump": False}}
    losses = []
    torch.manual_seed(1)
    with trainsentry.TrainMonitor(config).watch(model, sgd) as monitor:
        for step in range(steps):
            step_hook(step)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(torch.randn(16, 8)).float().square().mean()
            loss.backward()
            losses.append(float(loss))
            sgd.step()
            sgd.zero_grad()
        table = monitor.records()
        monitor.flush()
        found = monitor.incidents
    return losses, table[table["name"].str.startswith(("recomputed.", "recomputed_gradient."))], found


@pytest.mark.parametrize("autocast", [False, True])
def test_a_healthy_device_gives_the_same_bits_and_training_does_not_change(tmp_path, autocast):
    with_it, rows, found = train(tmp_path / "a", net(), autocast=autocast)
    without, none, _ = train(tmp_path / "b", net(), autocast=autocast, recompute=False)
    assert with_it == without
    assert none.empty
    what = ("recomputed", "recomputed_gradient")[: 1 + operation_nodes.TELLS_DEFAULT_HOOKS]
    assert set(rows["name"]) == {f"{of}.{i}" for of in what for i in (0, 1, 3, 4)}, "dropout draws random numbers"
    assert (rows["value"] == 0).all()
    assert found == ()


def test_what_comes_out_the_same_in_host_memory_is_not_computed_twice(tmp_path, monkeypatch):
    calls, original = [], repeated_calls._again
    monkeypatch.setattr(repeated_calls, "_again", lambda *args: calls.append(1) or original(*args))
    _, rows, _ = train(tmp_path, net())
    assert len(calls) == rows["name"].str.startswith("recomputed.").sum()


@pytest.mark.parametrize(("repeats", "told"), [([1, 1, 1, 1, 1], 3.0), ([1, 1, 0, 1, 1], math.nan), ([0], 0.0)])
def test_a_result_is_wrong_if_it_comes_out_otherwise_five_times_alike(repeats, told):
    rows, given = StepRows(SeriesTable()), iter(repeats)
    series_id = rows.table.series_id(Series("recomputed.x", "recomputed.x", scalar=True))
    repeated = repeated_calls.RepeatedCalls(rows, Guard(), enabled=True)
    repeated._compare(series_id, [torch.zeros(3), None], lambda: [torch.full((3,), float(next(given))), None])
    assert list(given) == []
    assert rows.take().resolve()[2][:, VALUE].tolist() == pytest.approx([told], nan_ok=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_number_of_wrong_elements_is_right_whatever_dtype_a_program_has_made_the_default(dtype):
    rows, x = StepRows(SeriesTable()), torch.zeros(70_001)
    repeated = repeated_calls.RepeatedCalls(rows, Guard(), enabled=True)
    torch.set_default_dtype(dtype)
    try:
        repeated._compare(0, [x], lambda: [x + 1])
        answers = iter([x + 1, *[None] * repeated_calls.REPEATS])  # of another shape from then on
        repeated._compare(1, [x], lambda: [next(answers)])
    finally:
        torch.set_default_dtype(torch.float32)
    assert rows.take().resolve()[2][:, VALUE].tolist() == [70_001.0, 70_001.0]


def test_a_wrong_output_is_found_and_its_module_named(tmp_path):
    model, now = net(), {"step": 0}

    def wrong(module, args, output):
        if now["step"] >= 20:
            output.data[:, 3] = 0.0  # no operation of the graph, as the device does it

    model[3].register_forward_hook(wrong)
    _, _, found = train(tmp_path, model, step_hook=lambda step: now.update(step=step))
    [incident, *_] = [i for i in found if i.kind == "arithmetic"]
    assert (incident.name, incident.quantity) == ("3.output.0", "activation_output")
    assert 20 <= incident.step < 28
    assert "16 elements" in incident.summary


@gradients_too
@pytest.mark.parametrize("module", [0, 1, 3])
def test_a_wrong_gradient_is_found_and_its_module_named(tmp_path, module):
    model, now = net(), {"step": 0}

    def wrong(used, arrived):
        of_a_weight_or_input = used[-1]
        return (*used[:-1], 1.001 * of_a_weight_or_input) if now["step"] >= 40 else None

    model[module].register_forward_hook(lambda module, args, output: output.grad_fn.register_hook(wrong) and None)
    _, _, found = train(tmp_path, model, 60, step_hook=lambda step: now.update(step=step))
    [incident, *_] = [i for i in found if i.kind == "arithmetic"]
    assert (incident.name, incident.quantity) == (f"{module}.input.0", "activation_grad_input")
    assert 40 <= incident.step < 48
    assert f"elements of the gradients that {module} computes came out otherwise when its backward pass ran again" in (
        incident.summary
    )


@gradients_too
@pytest.mark.parametrize(("layers", "every"), [(15, 2), (16, 1)])
def test_gradients_of_a_small_model_are_computed_again_every_other_time(tmp_path, layers, every):
    model = nn.Sequential(nn.Linear(8, 8), *(nn.Linear(8, 8) for _ in range(layers - 2)), nn.Linear(8, 4))
    _, rows, _ = train(tmp_path, model, steps=2 * layers)
    counts = rows["name"].value_counts()
    assert {counts[f"recomputed.{i}"] for i in range(layers)} == {2}
    assert {counts[f"recomputed_gradient.{i}"] for i in range(1, layers)} == {2 // every}
    assert counts["recomputed_gradient.0"] == 1, "the first step shows whether the backward pass is compiled"


def test_what_autograd_may_not_run_twice_runs_once(tmp_path):
    calls = []

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            calls.append(1)
            return gradient

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.head = nn.Linear(8, 4)

        def forward(self, x):
            return self.head(checkpoint(self.inner, x, use_reentrant=False))

    model = Checkpointed()
    model.head.register_forward_hook(lambda module, args, output: Counted.apply(output))
    _, rows, found = train(tmp_path, model, steps=12)
    assert set(rows["name"]) == {"recomputed.inner", "recomputed.head"}
    assert (len(calls), found) == (12, ())


def test_what_a_hook_makes_of_an_output_is_not_computed_again(tmp_path):
    """A prompt in the place of an output: its node accumulates a gradient, and would do so twice more."""

    def gradients(watch):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 4))
        model.prompt = nn.Parameter(torch.ones(16))
        model[0].register_forward_hook(lambda module, args, output: model.prompt.view(4, 4))
        sgd = torch.optim.SGD(model.parameters(), lr=0.05)
        config = {"output_dir": str(tmp_path), "strict": True, "collect": {"activations": {"every": 1}}}
        monitor = trainsentry.TrainMonitor(config).watch(model, sgd) if watch else contextlib.nullcontext()
        found = []
        with monitor:
            for _ in range(6):
                (model(torch.randn(4, 8)) * 3).sum().backward()
                found.append(model.prompt.grad.clone())
                sgd.step()
                sgd.zero_grad()
        return found

    assert all(torch.equal(a, b) for a, b in zip(gradients(watch=True), gradients(watch=False), strict=True))


def test_sparse_and_batched_gradients_are_left_alone(tmp_path):
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4))
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    config = {"output_dir": str(tmp_path), "strict": True, "collect": {"activations": {"every": 1}}}
    with trainsentry.TrainMonitor(config).watch(model, sgd) as monitor:
        for _ in range(8):
            out = model(torch.arange(9))
            torch.autograd.grad(
                out, model[1].weight, torch.eye(36).view(36, 9, 4), is_grads_batched=True, retain_graph=True
            )
            out.sum().backward()
            sgd.step()
            sgd.zero_grad()
        table = monitor.records()
    assert not table["name"].str.startswith("recomputed_gradient.0").any()
    assert (table["quantity"] == "activation_output").sum() >= 16


def test_nothing_is_computed_again_after_the_end(tmp_path, monkeypatch):
    calls = []
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(16)))
    config = {"output_dir": str(tmp_path), "strict": True, "collect": {"activations": {"every": 1}}}
    monkeypatch.setattr(repeated_calls.RepeatedCalls, "repeat_backward", lambda *args: calls.append(args))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = trainsentry.TrainMonitor(config).watch(model, sgd)
    for _ in range(3):
        loss = model(torch.randn(2, 8)).sum()
        sgd.step()
        loss.backward()
        sgd.zero_grad()
    assert calls == [], "that pass belongs to the step before"
    loss = model(torch.randn(2, 8)).sum()
    monitor.close()
    loss.backward()
    assert calls == []


@gradients_too
def test_a_second_backward_pass_and_one_in_a_later_step_add_nothing(tmp_path):
    model = nn.Sequential(nn.Linear(8, 4))
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    config = {"output_dir": str(tmp_path), "strict": True, "collect": {"activations": {"every": 1}}}
    late = None
    with trainsentry.TrainMonitor(config).watch(model, sgd) as monitor:
        for step in range(8):
            loss = model(torch.randn(16, 8)).square().mean()
            if step == 5:
                late = loss
            else:
                loss.backward(retain_graph=True)
                loss.backward()
            if step == 6:
                late.backward()
            sgd.step()
            sgd.zero_grad()
        table = monitor.records()
    assert table[table["name"] == "recomputed_gradient.0"]["step"].tolist() == [1, 3, 7]


def test_a_hook_that_changes_outputs_by_design_is_no_fault(tmp_path):
    model = net()
    model[0].register_forward_hook(lambda module, args, output: output * 2)
    assert train(tmp_path, model)[2] == ()


def test_kernels_that_are_not_repeatable_are_not_judged(tmp_path, monkeypatch):
    model, calls = net(), iter(range(10_000))
    original = nn.LayerNorm.forward
    monkeypatch.setattr(nn.LayerNorm, "forward", lambda self, x: original(self, x) + 1e-3 * (next(calls) % 5))
    _, rows, found = train(tmp_path, model)
    assert rows[rows["name"] == "recomputed.3"]["value"].isna().all()
    assert found == ()


@gradients_too
def test_own_forwards_subclasses_and_bounded_embeddings_are_left_alone(tmp_path):
    class Own(nn.Linear):
        pass

    model = nn.Sequential(Own(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    model[1].forward = model[1].forward
    _, rows, _ = train(tmp_path, model, steps=6)
    assert set(rows["name"]) == {"recomputed.2", "recomputed_gradient.2"}
