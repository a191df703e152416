"""Each quantity on MindSpore is what its name says, compared with NumPy."""

import json

import mindspore as ms
import numpy as np
import pytest
from cells import batches, net, train, watch, weights
from mindspore import Tensor, nn

from trainsentry.collectors.histogram import counts_of, parse, without_empty_bins
from trainsentry.collectors.mindspore.rows.step_rows import StepRows
from trainsentry.collectors.mindspore.rows.tensor_statistics import array_of, as_float
from trainsentry.collectors.series import Series, SeriesTable
from trainsentry.collectors.statistics import STATISTICS, reference


def test_numbers_are_numpys_of_the_same_tensors(out):
    model = net()
    optimizer = nn.Adam(model.trainable_params(), 1e-2)
    loss_fn = nn.MSELoss()
    grad = ms.value_and_grad(lambda x, y: loss_fn(model(x), y), None, optimizer.parameters)
    names = [name for name, _ in model.parameters_and_names()]
    with watch(out, model, optimizer) as monitor:
        for x, y in batches(3):
            loss, grads = grad(x, y)
            monitor.log(loss=loss)
            before = weights(model)
            state = {k: [p.asnumpy().copy() for p in getattr(optimizer, k)] for k in ("moment1", "moment2")}
            wanted = {"gradient": [g.asnumpy() for g in grads], "parameter": before, **state}
            optimizer(grads)
            wanted["update"] = [a - b for a, b in zip(weights(model), before, strict=True)]
        for quantity, arrays in wanted.items():
            got = monitor.metrics(quantity)
            assert sorted(got) == sorted(names)
            for name, array in zip(names, arrays, strict=True):
                truth = reference(array)
                numbers = [got[name][s] for s in STATISTICS]
                assert numbers == pytest.approx([truth[s] for s in STATISTICS], rel=1e-6, nan_ok=True), (quantity, name)
        assert monitor.metrics("loss")["loss"]["value"] == pytest.approx(float(loss.asnumpy()))
        assert monitor.metrics("learning_rate")["learning_rate"]["value"] == pytest.approx(1e-2)


@pytest.mark.parametrize(
    ("kind", "state"), [("SGD", {"momentum_buf"}), ("Adam", {"exp_avg", "exp_avg_sq"})], ids=["SGD", "Adam"]
)
def test_optimizers_of_mint_are_recorded_with_their_state(out, kind, state):
    model = net(layers=1)
    optimizer = getattr(ms.mint.optim, kind)(model.trainable_params(), lr=1e-2)
    names = {name for name, _ in model.parameters_and_names()}
    with watch(out, model, optimizer) as monitor:
        train(model, optimizer, 3, monitor)
        for quantity in {"gradient", "parameter", "update", *state}:
            assert set(monitor.metrics(quantity)) == names, quantity


def test_an_optimizer_without_a_kernel_fails_as_it_does_by_itself(out):
    model = net(layers=1)
    optimizer = ms.mint.optim.AdamW(model.trainable_params(), lr=1e-2)
    with pytest.raises(RuntimeError, match="AdamW") as bare:
        train(model, optimizer, 1)
    with watch(out, model, optimizer) as monitor, pytest.raises(RuntimeError) as watched:
        train(model, optimizer, 1, monitor)
    assert str(watched.value).splitlines()[0] == str(bare.value).splitlines()[0]
    assert json.loads((out / "rank0" / "status.json").read_text())["failures"] == {}


def test_activations_and_their_gradients_are_those_that_pass(out):
    model = net(layers=1)
    optimizer = nn.SGD(model.trainable_params(), 0.0)
    [(x, y)] = batches(1)
    seen = {}
    handle = model.head.register_forward_hook(lambda cell, args, output: seen.update(i=args[0], o=output))
    loss_fn = nn.MSELoss()
    with watch(out, model, optimizer) as monitor:
        _, grads = ms.value_and_grad(lambda x, y: loss_fn(model(x), y), None, optimizer.parameters)(x, y)
        optimizer(grads)
        outputs, inputs = monitor.metrics("activation_output"), monitor.metrics("activation_input")
        d_outputs, d_inputs = monitor.metrics("activation_grad_output"), monitor.metrics("activation_grad_input")
    handle.remove()
    assert outputs["head.output.0"]["norm"] == pytest.approx(np.linalg.norm(seen["o"].asnumpy()), rel=1e-6)
    assert inputs["head.input.0"]["norm"] == pytest.approx(np.linalg.norm(seen["i"].asnumpy()), rel=1e-6)
    d_output = 2 * (seen["o"].asnumpy() - y.asnumpy()) / y.size
    assert d_outputs["head.output.0"]["norm"] == pytest.approx(np.linalg.norm(d_output), rel=1e-5)
    d_input = d_output @ model.head.weight.asnumpy()
    assert d_inputs["head.input.0"]["norm"] == pytest.approx(np.linalg.norm(d_input), rel=1e-5)
    assert "blocks.0.up.output.0" in outputs


@pytest.mark.parametrize("dtype", [ms.float16, ms.float32, ms.float64, ms.bfloat16, ms.int32, ms.bool_])
def test_every_dtype_is_read_on_the_host_and_by_operations(dtype):
    values = np.linspace(-3, 3, 24).reshape(4, 6)
    tensor = Tensor(values.astype(np.float32)).astype(dtype)
    wanted = list(reference(as_float(array_of(tensor))).values())
    for on_device in (False, True):
        rows = StepRows(SeriesTable(), rows_on_device=on_device)
        for part in (tensor, tensor.swapaxes(0, 1), tensor[1:3]):
            rows.add(rows.table.series_id(Series(str(len(rows)), "gradient")), part)
        pending = rows.take()
        pending.wait()
        _, _, found = pending.resolve()
        assert found[0, :7].tolist() == pytest.approx(wanted, rel=1e-6, abs=1e-6, nan_ok=True)
        assert found[1, 3] == pytest.approx(wanted[3], rel=1e-6)
        assert found[2, 3] == pytest.approx(
            np.linalg.norm(as_float(array_of(tensor))[1:3].astype(np.float64)), rel=1e-6
        )


@pytest.mark.parametrize("bad", [[np.nan, 1, 2], [np.inf, -np.inf, 1], [np.nan] * 3, []])
def test_rows_of_tensors_that_are_not_finite_or_empty(bad):
    tensor = Tensor(np.asarray(bad, np.float32))
    for on_device in (False, True):
        rows = StepRows(SeriesTable(), rows_on_device=on_device)
        rows.add(rows.table.series_id(Series("a", "gradient")), tensor)
        pending = rows.take()
        pending.wait()
        found = pending.resolve()[2][0, :7]
        assert found.tolist() == pytest.approx(list(reference(bad).values()), nan_ok=True)


def test_gradient_accumulation_by_hand_counts_its_micro_steps(out):
    model = net()
    optimizer = nn.SGD(model.trainable_params(), 1e-2)
    loss_fn = nn.MSELoss()
    grad = ms.value_and_grad(lambda x, y: loss_fn(model(x), y), None, optimizer.parameters)
    data = list(batches(4))
    with watch(out, model, optimizer) as monitor:
        for first in (0, 2):
            total = None
            for x, y in data[first : first + 2]:
                _, grads = grad(x, y)
                total = grads if total is None else [a + b for a, b in zip(total, grads, strict=True)]
            optimizer(tuple(total))
        records = monitor.records()
    outputs = records[(records.quantity == "activation_output") & (records.name == "head.output.0")]
    assert outputs[["step", "micro_step"]].to_numpy().tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]


def test_an_evaluation_leaves_no_rows(out):
    model = net()
    optimizer = nn.SGD(model.trainable_params(), 1e-2)
    with watch(out, model, optimizer) as monitor:
        model(Tensor(np.ones((2, 4), np.float32)))
        train(model, optimizer, 1, monitor)
        records = monitor.records()
    outputs = records[(records.quantity == "activation_output") & (records.name == "head.output.0")]
    assert outputs.micro_step.tolist() == [0]


def test_histograms_count_the_values_of_what_is_read(out):
    model = net(layers=1)
    optimizer = nn.Adam(model.trainable_params(), 1e-2)
    with watch(out, model, optimizer, statistics=["norm", "histogram"]) as monitor:
        train(model, optimizer, 2)
        records = monitor.records(1)
    for quantity in ("gradient", "parameter", "moment1"):
        found = records[records.quantity == quantity].set_index("name").histogram
        sizes = {name: p.size for name, p in model.parameters_and_names()}
        assert {name: sum(parse(found[name])[1]) for name in sizes} == sizes
    updates = records[records.quantity == "update"]
    assert len(updates)
    assert all(parse(text)[0] for text in updates.histogram)


def test_a_bfloat16_parameter_is_counted_as_numpy_counts_it():
    values = np.random.default_rng(0).standard_normal(300).astype(np.float32)
    tensor = Tensor(values, ms.bfloat16)
    rows = StepRows(SeriesTable(), histograms=True)
    rows.add(0, tensor, divisor=4.0)
    histograms = rows.take().find_histograms()
    counts = counts_of(as_float(array_of(tensor)), 0.25)
    assert histograms.texts() == without_empty_bins(counts[None]).texts()
