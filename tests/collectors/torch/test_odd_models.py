"""The monitor reads what it can of odd models and loops, and leaves the rest alone."""

import logging

import pytest
import torch
from tiny_models import EVERY_STEP, flip_bit, mlp, train
from torch import nn

import trainsentry
from trainsentry.collectors.shared.forward_passes import MAX_CALLS, MAX_MICRO_STEPS


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def watch(model, out, optimizer=None, **config):
    settings = {"output_dir": str(out), "collect": EVERY_STEP, **config}
    return trainsentry.TrainMonitor(settings).watch(model, optimizer or sgd(model))


class Passes(nn.Module):
    """Hands an odd tensor to a module inside."""

    def __init__(self, odd):
        super().__init__()
        self.odd, self.inner, self.fc = odd, Takes(), nn.Linear(8, 4)

    def forward(self, x):
        return self.fc(self.inner(x, self.odd))


class Takes(nn.Module):
    def forward(self, x, odd):
        return x * 1.0


ODD = {
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "sparse_csr": lambda: torch.eye(4).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "meta": lambda: torch.ones(3, device="meta"),
    "uint16": lambda: torch.ones(3, dtype=torch.uint16),
    "empty": lambda: torch.empty(0, 4),
    "inference": torch.inference_mode()(lambda: torch.ones(3)),
}


@pytest.mark.parametrize("kind", ODD)
def test_an_odd_tensor_costs_at_most_its_own_row_and_the_dump_survives_it(out, kind, caplog):
    torch.manual_seed(0)
    model = Passes(ODD[kind]())
    optimizer = sgd(model)
    with watch(model, out, optimizer) as monitor:

        def before_step(step):
            if step == 8:
                flip_bit(model.fc.weight, 3)

        train(model, optimizer, 12, monitor, before_step=before_step)
        assert {"inner.input.0", "fc.input.0", "fc.output.0"} <= {*monitor.metrics("activation_input")} | {
            *monitor.metrics("activation_output")
        }
        monitor.flush()
        assert [i.name for i in monitor.incidents] == ["fc.weight"]
        assert not monitor._guard.disabled
    assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []
    assert (out / "dump" / "step9" / "rank0" / "dump.json").exists()


def test_a_read_that_fails_leaves_no_row_behind(out, monkeypatch):
    from trainsentry.collectors.torch.rows import step_rows

    original = step_rows.read_at

    def fails(address, tensor, *args):
        if tuple(tensor.shape) == (16, 16):
            raise RuntimeError("planted")
        return original(address, tensor, *args)

    monkeypatch.setattr(step_rows, "read_at", fails)
    model = mlp()
    optimizer = sgd(model)
    with watch(model, out, optimizer) as monitor:
        train(model, optimizer, 3, monitor)
        assert set(monitor.metrics("activation_output")) == {"2.output.0", "output.0"}
        monitor.flush()
        assert monitor.incidents == ()
        assert any("RuntimeError" in part for part in monitor._guard.failures)


def test_sparse_gradients_and_their_optimizer(out):
    model = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Linear(8, 4))
    sparse, dense = torch.optim.SparseAdam(model[0].parameters()), sgd(model[1])
    with watch(model, out, [sparse, dense], strict=True) as monitor:
        for _ in range(3):
            model(torch.randint(0, 50, (6,))).sum().backward()
            norm = model[0].weight.grad.to_dense().norm().item()
            for optimizer in (sparse, dense):
                optimizer.step()
                optimizer.zero_grad()
        assert monitor.metrics("gradient")["0.weight"]["norm"] == pytest.approx(norm, rel=1e-6)
        assert monitor.metrics("gradient")["0.weight"]["zeros"] > 0.8


def test_torchscript_parts_lazy_modules_and_functional_transforms(out):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.script = torch.jit.script(nn.Linear(8, 8))
            self.lazy, self.inner = nn.LazyLinear(4), nn.Linear(8, 8)

        def forward(self, x):
            return self.lazy(torch.func.vmap(self.inner)(self.script(x)))

    model = Mixed()
    optimizer = torch.optim.SGD([*model.script.parameters(), *model.inner.parameters()], lr=0.1)
    with watch(model, out, optimizer) as monitor:
        train(model, optimizer, 2, monitor)
        assert not monitor._guard.disabled
        assert "lazy.output.0" in monitor.metrics("activation_output")


def test_evaluation_without_no_grad_fills_no_memory(out):
    model = mlp()
    optimizer = sgd(model)
    with watch(model, out, optimizer, strict=True) as monitor:
        for _ in range(MAX_MICRO_STEPS + 30):
            model(torch.ones(2, 8))
        train(model, optimizer, 1, monitor)
        assert monitor.records()["micro_step"].max() == MAX_MICRO_STEPS - 1
        assert monitor._loop.watch.left_out == 31


def test_a_cell_called_for_each_token_is_recorded_up_to_a_bound(out):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.fc = nn.GRUCell(8, 8), nn.Linear(8, 4)

        def forward(self, x):
            h = torch.zeros(len(x), 8)
            for _ in range(40):
                h = self.cell(x, h)
            return self.fc(h)

    model = Recurrent()
    optimizer = sgd(model)
    with watch(model, out, optimizer, strict=True) as monitor:
        train(model, optimizer, 1, monitor)
        cells = [n for n in monitor.metrics("activation_output") if n.startswith("cell")]
        assert len(cells) == MAX_CALLS


def test_a_value_that_is_no_scalar_costs_itself_only(out, caplog):
    model = mlp()
    optimizer = sgd(model)
    with watch(model, out, optimizer) as monitor:
        for value in (None, "text", [0.1], torch.ones(3)):
            monitor.log(loss=1.0, note=value)
            train(model, optimizer, 1)
        assert monitor.records().query("name == 'loss'")["value"].tolist() == [1.0] * 4
    assert sum("note" in r.getMessage() for r in caplog.records) == 1


def test_thousands_of_values_within_a_step_keep_the_last(out):
    model = mlp()
    optimizer = sgd(model)
    with watch(model, out, optimizer, strict=True) as monitor:
        for i in range(5000):
            monitor.log(val_loss=float(i))
        train(model, optimizer, 1)
        rows = monitor.records().query("name == 'val_loss'")
        assert len(rows) == 64
        assert rows["value"].max() == 4999.0


def test_an_optimizer_that_raises_leaves_no_stale_rows(out):
    model = mlp()
    optimizer = sgd(model)
    inner, failing = optimizer.param_groups, {"left": 2}

    def fail(*_):
        if failing["left"]:
            failing["left"] -= 1
            raise ArithmeticError("the user's own")

    with watch(model, out, optimizer, strict=True) as monitor:
        optimizer.register_step_pre_hook(fail)
        model(torch.ones(2, 8)).sum().backward()
        for _ in range(2):
            with pytest.raises(ArithmeticError):
                optimizer.step()
        optimizer.step()
        rows = monitor.records()
        assert not rows.duplicated(["step", "name", "quantity", "micro_step"]).any()
        assert len(rows[rows["quantity"] == "update"]) == 4
    assert inner is optimizer.param_groups


def test_a_forward_that_raised_and_was_tried_again_is_one_micro_step(out):
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.fail = nn.Linear(8, 4), True

        def forward(self, x):
            y = self.fc(x)
            if self.fail:
                self.fail = False
                raise MemoryError("too large a batch")
            return y

    model = Fails()
    optimizer = sgd(model)
    with watch(model, out, optimizer, strict=True) as monitor:
        with pytest.raises(MemoryError):
            model(torch.ones(4, 8))
        model(torch.full((2, 8), 2.0)).sum().backward()
        optimizer.step()
        rows = monitor.records()
        assert set(rows["micro_step"]) == {0}
        assert rows.query("name == 'fc.input.0' and quantity == 'activation_input'")["max"].tolist() == [2.0]


def test_a_critic_that_steps_several_times_has_a_row_for_each(out):
    model = nn.ModuleDict({"generator": mlp(), "critic": mlp()})
    generator, critic = sgd(model["generator"]), sgd(model["critic"])
    with watch(model, out, [generator, critic], strict=True) as monitor:
        for _ in range(2):
            for _ in range(3):
                critic.zero_grad()
                model["critic"](torch.randn(4, 8)).sum().backward()
                critic.step()
            generator.zero_grad()
            model["generator"](torch.randn(4, 8)).sum().backward()
            generator.step()
        rows = monitor.records()
        assert sorted(set(rows["step"])) == [0, 1]
        assert not rows.duplicated(["step", "name", "quantity", "micro_step"]).any()
        mine = rows.query("step == 1 and name == 'critic.0.weight' and quantity == 'gradient'")
        assert mine["micro_step"].tolist() == [0, 1, 2]
        passes = rows.query("step == 1 and name == 'critic.0.output.0' and quantity == 'activation_output'")
        assert passes["micro_step"].tolist() == [0, 1, 2]


def test_the_told_accumulation_is_checked_against_what_is_seen(out, caplog):
    model = mlp()
    optimizer = sgd(model)
    monitor = trainsentry.TrainMonitor({"output_dir": str(out)}).watch(model, optimizer, grad_acc_steps=4)
    with monitor:
        train(model, optimizer, 2)
    assert sum("grad_acc_steps=4" in r.getMessage() for r in caplog.records) == 1


def test_a_sharded_tensor_shows_what_this_rank_holds():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from trainsentry.collectors.series import SeriesTable
    from trainsentry.collectors.torch.rows.step_rows import StepRows

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        tensor = distribute_tensor(torch.arange(6.0).view(3, 2), init_device_mesh("cpu", (1,)), [Shard(0)])
        table = SeriesTable()
        rows = StepRows(table)
        rows.add(0, tensor)
        rows.add_shared(1, tensor)
        _, layouts, values = rows.take().resolve()
        assert values[:, 1].tolist() == [5.0, 5.0]
        assert table.layouts[layouts[0]].shape == (3, 2)
    finally:
        dist.destroy_process_group()


def test_the_graph_is_learned_where_the_root_is_never_called(out):
    import json

    model = nn.ModuleDict(
        {"encoder": nn.Sequential(nn.Linear(8, 8), nn.ReLU()), "decoder": nn.Sequential(nn.Linear(8, 4))}
    )
    optimizer = sgd(model)
    with watch(model, out, optimizer, strict=True):
        for _ in range(2):
            model["decoder"](model["encoder"](torch.ones(2, 8))).sum().backward()
            optimizer.step()
    graph = json.loads((out / "rank0" / "graph.json").read_text())
    names = [m["name"] for m in graph["modules"]]
    assert names[:5] == ["encoder", "encoder.0", "encoder.1", "decoder", "decoder.0"]
    assert ["encoder", "decoder"] in graph["edges"] or ["encoder", "decoder.0"] in graph["edges"]
