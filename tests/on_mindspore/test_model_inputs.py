"""The model's inputs are read at every step of MindSpore too, and the rows of a bad batch are named."""

import mindspore as ms
import numpy as np
import pytest
from cells import batches, net
from mindspore import Tensor, nn

import trainsentry
from trainsentry.collectors.mindspore.hooks import model_inputs
from trainsentry.collectors.mindspore.hooks.model_inputs import KeptInput, LastBatches, first_part
from trainsentry.collectors.mindspore.rows.tensor_statistics import row_of

FAULT = 45


def train(out, steps, batch=lambda step, x, y: (x, y), **config):
    """Train with a functional loop whose batches `batch` changes; return the incidents and the recorded table."""
    model, loss_fn = net(), nn.MSELoss()
    optimizer = nn.Adam(model.trainable_params(), 3e-3)
    grad = ms.value_and_grad(lambda x, y: loss_fn(model(x), y), None, optimizer.parameters)
    config = {"output_dir": str(out), "strict": True, **config}
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        for step, given in enumerate(batches(steps)):
            x, y = batch(step, *given)
            loss, gradients = grad(x, y)
            monitor.log(loss=loss)
            optimizer(gradients)
        monitor.flush()
        return sorted(monitor.incidents, key=lambda i: i.id), monitor.records()


def test_each_step_has_the_norm_of_its_input_by_default(out):
    given = []
    _, records = train(out, 6, lambda step, x, y: given.append(x.asnumpy()) or (x, y))
    rows = records.query("name == 'input.0'")
    assert rows["step"].tolist() == [0, 1, 2, 3, 4, 5]
    assert rows["norm"].tolist() == pytest.approx([float(np.linalg.norm(x)) for x in given], rel=1e-6)


def test_of_a_large_input_the_first_samples_are_read(out, monkeypatch):
    monkeypatch.setattr(model_inputs, "LARGEST_INPUT", 12)
    given = []
    _, records = train(out, 3, lambda step, x, y: given.append(x.asnumpy()) or (x, y))
    rows = records.query("name == 'input.0.part'")
    assert rows["norm"].tolist() == pytest.approx([float(np.linalg.norm(x[:3])) for x in given], rel=1e-6)


def test_a_part_is_cut_from_the_first_dimension_on():
    assert first_part(ms.ops.zeros((64, 3, 224, 224))).shape == (1, 1, 224, 224)
    assert first_part(ms.ops.zeros((8, 4))).shape == (8, 4)


def test_an_evaluation_reads_nothing(out):
    model = net()
    optimizer = nn.Adam(model.trainable_params(), 3e-3)
    with trainsentry.TrainMonitor({"output_dir": str(out), "strict": True}).watch(model, optimizer) as monitor:
        for x, _ in batches(3):
            model(x)
        assert not monitor._loop.watch.rows._ids


def test_a_loader_that_is_stuck_is_named(out):
    kept = {}
    found, _ = train(out, FAULT + 6, lambda step, x, y: kept.setdefault("batch", (x, y)) if step >= FAULT else (x, y))
    assert (found[0].quantity, found[0].name, found[0].step) == ("data", "input.0", FAULT + 1)


@pytest.mark.parametrize("everything", [False, True])
def test_the_rows_of_a_bad_batch_are_named_and_dumped(out, everything):
    def spoilt(step, x, y):
        if step != FAULT:
            return x, y
        values = x.asnumpy().copy()
        values[5] *= 1e5
        return Tensor(values), y

    collect = {"collect": {"activations": {"every": 1}}} if everything else {}
    found, _ = train(out, FAULT + 4, spoilt, on_incident={"dump": True}, **collect)
    assert (found[0].name, found[0].quantity, found[0].step) == ("input.0", "data", FAULT)
    assert "row 5 of 16" in found[0].summary
    dumped = sorted((out / "dump" / f"step{FAULT}" / "rank0" / "dump_tensor_data").glob("*.forward.0.input.0.npy"))
    assert any(np.abs(np.load(path)[5]).max() > 1e3 for path in dumped)


def test_an_input_that_was_overwritten_is_not_looked_at():
    kept = LastBatches()
    x = Tensor(np.ones((4, 3), np.float32))
    kept.keep(KeptInput("input.0", 0, x, row_of(x, 0.0)))
    assert len(kept.rows(0)) == 1
    ms.ops.assign(x, Tensor(np.zeros((4, 3), np.float32)))
    assert kept.rows(0) == []


def test_kept_inputs_hold_a_bounded_memory_and_older_steps_go_first():
    kept = LastBatches(most_bytes=100)
    for step in range(3):
        kept.open_step()
        kept.keep(KeptInput("input.0", 0, Tensor(np.full(12, step, np.float32)), None))  # 48 bytes
    assert [len(kept.of(back)) for back in range(4)] == [1, 1, 0, 0]
