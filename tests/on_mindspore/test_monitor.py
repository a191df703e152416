"""The monitor on MindSpore: the same records, nothing changed, nothing left behind."""

import copy
import json
import subprocess
import sys
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from cells import batches, net, train, weights
from mindspore import Tensor, nn, ops

import trainsentry
from trainsentry.collectors.mindspore.hooks.optimizer_steps import ScalerWatch
from trainsentry.collectors.mindspore.rendezvous import follow
from trainsentry.collectors.statistics import STATISTICS, reference

EVERY_STEP = {part: {"every": 1} for part in ("gradients", "parameters", "optimizer_state", "updates", "activations")}
OPTIMIZERS = {
    "Adam": lambda p: nn.Adam(p, 1e-2),
    "AdamWeightDecay": lambda p: nn.AdamWeightDecay(p, 1e-2),
    "Momentum": lambda p: nn.Momentum(p, 1e-2, 0.9),
    "SGD": lambda p: nn.SGD(p, 1e-2, momentum=0.9),
    "experimental.AdamW": lambda p: ms.experimental.optim.AdamW(p, lr=1e-2),
}


def watch(out, model, optimizer, **config):
    config = {"output_dir": str(out), "strict": True, "detect": False, "collect": EVERY_STEP, **config}
    return trainsentry.TrainMonitor(config).watch(model, optimizer)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_is_the_same_to_the_bit(out, kind):
    model = net()
    bare, wanted = train(model, OPTIMIZERS[kind](model.trainable_params()), 6), weights(model)
    model = net()
    optimizer = OPTIMIZERS[kind](model.trainable_params())
    with watch(out, model, optimizer) as monitor:
        assert train(model, optimizer, 6, monitor) == bare
    assert all(np.array_equal(a, b) for a, b in zip(weights(model), wanted, strict=True))


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
    from trainsentry.collectors.mindspore.rows.step_rows import StepRows
    from trainsentry.collectors.mindspore.rows.tensor_statistics import array_of, as_float
    from trainsentry.collectors.series import Series, SeriesTable

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
    from trainsentry.collectors.mindspore.rows.step_rows import StepRows
    from trainsentry.collectors.series import Series, SeriesTable

    tensor = Tensor(np.asarray(bad, np.float32))
    for on_device in (False, True):
        rows = StepRows(SeriesTable(), rows_on_device=on_device)
        rows.add(rows.table.series_id(Series("a", "gradient")), tensor)
        pending = rows.take()
        pending.wait()
        found = pending.resolve()[2][0, :7]
        assert found.tolist() == pytest.approx(list(reference(bad).values()), nan_ok=True)


def test_close_leaves_every_cell_as_it_was(out):
    model = net()
    optimizer = nn.Adam(model.trainable_params(), 1e-2)
    classes = [type(cell) for _, cell in model.cells_and_names()]
    kind = type(optimizer)
    monitor = watch(out, model, optimizer)
    assert type(optimizer) is not kind
    train(model, optimizer, 2, monitor)
    monitor.close()
    assert [type(cell) for _, cell in model.cells_and_names()] == classes
    assert type(optimizer) is kind


def test_cells_are_as_they_were_on_steps_that_are_not_sampled(out):
    model = net()
    optimizer = nn.Adam(model.trainable_params(), 1e-2)
    classes = [type(cell) for _, cell in model.cells_and_names()]
    with watch(out, model, optimizer, collect={"activations": {"every": 2}}) as monitor:
        train(model, optimizer, 1, monitor)
        assert [type(cell) for _, cell in model.cells_and_names()] == classes
        train(model, optimizer, 1, monitor)
        assert [type(cell) for _, cell in model.cells_and_names()] != classes


def test_a_copy_of_a_watched_model_leaves_no_row(out):
    model = net()
    optimizer = nn.Adam(model.trainable_params(), 1e-2)
    with watch(out, model, optimizer) as monitor:
        average = copy.deepcopy(model)
        assert type(average.head) is nn.Dense
        average(Tensor(np.ones((2, 4), np.float32)))
        train(model, optimizer, 1, monitor)
        assert (
            len(monitor.records()[lambda r: r.quantity == "activation_output"].name)
            == len(list(model.cells_and_names())) - 1
        )  # a list of cells is never called


def test_an_error_of_the_users_own_goes_its_way(out):
    model = net()
    optimizer = nn.Adam(model.trainable_params(), 1e-2)
    with watch(out, model, optimizer) as monitor:
        with pytest.raises((ValueError, RuntimeError, TypeError)):
            model(Tensor(np.ones((2, 5), np.float32))).asnumpy()
        assert len(train(model, optimizer, 2, monitor)) == 2
        assert not monitor._guard.disabled


def test_train_one_step_cell_and_model_train_are_seen_as_the_functional_style_is(out, tmp_path):
    model = net()
    optimizer = nn.Momentum(model.trainable_params(), 1e-2, 0.9)
    with watch(out, model, optimizer) as monitor:
        train(model, optimizer, 3, monitor)
        plain = monitor.records()
    model = net()
    optimizer = nn.Momentum(model.trainable_params(), 1e-2, 0.9)
    step = nn.TrainOneStepCell(nn.WithLossCell(model, nn.MSELoss()), optimizer)
    step.set_train()
    with watch(tmp_path / "cell", model, optimizer) as monitor:
        for x, y in batches(3):
            step(x, y)
        cell = monitor.records()
    columns = ["step", "name", "quantity", "norm"]
    keys = columns[:-1]
    for quantity in ("gradient", "parameter", "update", "activation_output", "activation_grad_output"):
        a, b = (t[t.quantity == quantity][columns].sort_values(keys).reset_index(drop=True) for t in (plain, cell))
        assert a.equals(b), quantity


def dataset(steps):
    data = [(x.asnumpy(), y.asnumpy()) for x, y in batches(steps)]
    return ms.dataset.GeneratorDataset(data, ["x", "y"], shuffle=False)


@pytest.mark.parametrize("mode", [ms.PYNATIVE_MODE, ms.GRAPH_MODE])
def test_the_callback_of_model_train_ends_steps_and_logs_their_loss(out, mode):
    from trainsentry.monitor.mindspore_callbacks import MonitorStep

    ms.set_context(mode=mode)
    model = net()
    optimizer = nn.Momentum(model.trainable_params(), 1e-2, 0.9)
    monitor = watch(out, model, optimizer)
    ms.train.Model(model, nn.MSELoss(), optimizer).train(
        1, dataset(4), callbacks=[MonitorStep(monitor)], dataset_sink_mode=False
    )
    records = monitor.records()
    monitor.close()
    assert sorted(records.step.unique()) == [0, 1, 2, 3]
    assert len(records[records.quantity == "loss"]) == 4
    assert len(records[(records.quantity == "parameter") & (records.name == "head.weight")]) == 4
    assert len(records[(records.quantity == "update") & (records.name == "head.weight")]) == 4
    assert len(records[(records.quantity == "moments") & (records.name == "head.weight")]) == 4
    if mode == ms.GRAPH_MODE:
        assert "compiled steps" in monitor._guard.failures
        assert not len(records[records.quantity == "gradient"])
    else:
        assert len(records[(records.quantity == "gradient") & (records.name == "head.weight")]) == 4


def test_a_jit_step_compiles_and_gives_the_same_and_its_weights_are_read(out):
    def trained(monitored):
        model = net()
        optimizer = nn.Momentum(model.trainable_params(), 1e-2, 0.9)
        loss_fn = nn.MSELoss()

        def forward(x, y):
            return loss_fn(model(x), y)

        grad = ms.value_and_grad(forward, None, optimizer.parameters)

        @ms.jit
        def step(x, y):
            loss, grads = grad(x, y)
            optimizer(grads)
            return loss

        monitor = watch(out, model, optimizer) if monitored else None
        losses = []
        for x, y in batches(4):
            loss = step(x, y)
            losses.append(float(loss.asnumpy()))
            if monitor is not None:
                monitor.log(loss=loss)
                monitor.step()
        records = None
        if monitor is not None:
            records = monitor.records()
            monitor.close()
        return losses, weights(model), records

    losses, wanted, _ = trained(monitored=False)
    again, got, records = trained(monitored=True)
    assert losses == again
    assert all(np.array_equal(a, b) for a, b in zip(wanted, got, strict=True))
    update = records[(records.quantity == "update") & (records.name == "head.weight")]
    assert len(update) == 4
    assert (update.norm > 0).all()


def test_a_jit_part_inside_an_eager_step_is_passed_over_and_the_rest_is_read(out):
    class Part(nn.Cell):
        def __init__(self):
            super().__init__()
            self.fc = nn.Dense(4, 4)

        @ms.jit
        def construct(self, x):
            return ops.relu(self.fc(x))

    model = nn.SequentialCell(Part(), nn.Dense(4, 2))
    optimizer = nn.SGD(model.trainable_params(), 1e-2)
    with watch(out, model, optimizer) as monitor:
        losses = train(model, optimizer, 3, monitor)
        outputs, gradients = monitor.metrics("activation_output"), monitor.metrics("gradient")
    assert losses[2] < losses[0] * 1.5
    assert {"0.output.0", "1.output.0"} <= set(outputs)
    assert "0.fc.weight" in gradients


def test_a_step_that_the_loss_scaler_skips_is_recorded_as_such(out):
    model = net()
    optimizer = nn.Momentum(model.trainable_params(), 1e-2, 0.9)
    scaler = ms.amp.DynamicLossScaler(2.0**10, 2, 100)
    loss_fn = nn.MSELoss()
    bad = []

    def forward(x, y):
        loss = loss_fn(model(x), y)
        return scaler.scale(loss * (np.inf if bad else 1.0))

    grad = ms.value_and_grad(forward, None, optimizer.parameters)
    monitor = trainsentry.TrainMonitor({"output_dir": str(out), "strict": True, "collect": EVERY_STEP})
    monitor.watch(model, optimizer, grad_scaler=scaler)
    for n, (x, y) in enumerate(batches(5)):
        bad[:] = [1] if n == 2 else []
        _, grads = grad(x, y)
        finite = ms.amp.all_finite(grads)
        if finite:
            optimizer(scaler.unscale(grads))
        scaler.adjust(finite)
    records = monitor.records()
    monitor.close()
    assert sorted(records.step.unique()) == [0, 1, 2, 3, 4]
    assert records[records.quantity == "skipped"].step.tolist() == [2]
    scales = records[records.quantity == "loss_scale"].set_index("step")["max"]
    assert scales[3] == 2.0**9
    assert "adjust" not in vars(scaler)
    assert not [i for i in monitor.incidents if i.kind == "overflow" and i.severity == "critical"]


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


@pytest.mark.parametrize(
    ("model", "optimizer", "error", "named"),
    [
        (nn.ReLU, lambda m: None, ValueError, "ReLU has no parameters"),
        (net, lambda m: "adam", TypeError, "str"),
        (net, lambda m: nn.SGD(net().trainable_params(), 0.1), ValueError, "none of the parameters"),
        (list, lambda m: None, TypeError, "list"),
    ],
)
def test_mistakes_are_named(out, model, optimizer, error, named):
    made = model()
    with pytest.raises(error, match=named):
        trainsentry.TrainMonitor({"output_dir": str(out)}).watch(made, optimizer(made))


def test_files_say_which_framework_wrote_them(out):
    model = net()
    optimizer = nn.Adam(model.trainable_params(), 1e-2)
    with watch(out, model, optimizer) as monitor:
        train(model, optimizer, 2, monitor)
    run = json.loads((out / "run.json").read_text())
    assert "mindspore" in json.dumps(run)
    graph = json.loads((out / "rank0" / "graph.json").read_text())
    assert ["blocks.0.norm", "blocks.0.up"] in graph["edges"]
    assert {p.name for p in (out / "rank0").glob("*_0-999.csv")} >= {"moment1_0-999.csv", "gradient_0-999.csv"}


def test_torch_is_never_imported(out):
    code = f"""
import sys
sys.path[:0] = {sys.path!r}
import cells, trainsentry
from mindspore import nn
model = cells.net()
optimizer = nn.Adam(model.trainable_params(), 1e-2)
with trainsentry.TrainMonitor({{"output_dir": {str(out)!r}}}).watch(model, optimizer) as monitor:
    cells.train(model, optimizer, 3, monitor)
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


class Sharing(nn.Cell):
    """Writes into what its caller gives it."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Dense(4, 4)

    def construct(self, x, aux, cache):
        x = self.fc(x)
        aux.append(x.mean())
        cache["x"] = x
        return x


class Sharers(nn.Cell):
    """Three of them, with one list and one dictionary."""

    def __init__(self):
        super().__init__()
        self.parts = nn.CellList([Sharing() for _ in range(3)])
        self.head = nn.Dense(4, 2)
        self.lengths = []

    def construct(self, x):
        aux, cache = [], {}
        for part in self.parts:
            x = part(x, aux, cache)
        self.lengths.append((len(aux), len(cache)))
        return self.head(x) + sum(aux)


def test_what_cells_write_into_stays_the_programs_own(out):
    def trained(monitored):
        ms.set_seed(0)
        model = Sharers()
        optimizer = nn.SGD(model.trainable_params(), 1e-2)
        monitor = watch(out, model, optimizer) if monitored else None
        losses = train(model, optimizer, 3)
        if monitor is not None:
            monitor.close()
        return losses, model.lengths

    assert trained(monitored=True) == trained(monitored=False)


def test_a_tensor_that_is_given_twice_is_one_object_inside_too(out):
    same = []

    class Attend(nn.Cell):
        def __init__(self):
            super().__init__()
            self.fc = nn.Dense(4, 2)

        def construct(self, query, key):
            same.append(query is key)
            return self.fc(query * key)

    class Outer(nn.Cell):
        def __init__(self):
            super().__init__()
            self.inp, self.attend = nn.Dense(4, 4), Attend()

        def construct(self, x):
            x = self.inp(x)
            return self.attend(x, key=x)

    model = Outer()
    optimizer = nn.SGD(model.trainable_params(), 1e-2)
    with watch(out, model, optimizer) as monitor:
        train(model, optimizer, 2, monitor)
    assert same == [True, True]


def test_steps_that_are_skipped_in_a_row_are_counted_at_the_next_update_by_watched_and_unwatched_ranks_alike():
    for factor in (2, 4):
        scaler = ms.amp.DynamicLossScaler(2.0**20, factor, 100)
        watch = ScalerWatch(scaler)
        for in_a_row in (1, 3, 0, 2):
            for _ in range(in_a_row):
                scaler.adjust(Tensor(False))
            assert watch.skipped() == in_a_row
    told = []
    listener = SimpleNamespace(
        before_optimizer=lambda optimizer, has_closure: told.append("update"),
        after_optimizer=lambda optimizer: None,
        scaler_skipped=lambda scaler, optimizer: told.append("skipped"),
    )
    model = net(layers=1)
    optimizer = nn.SGD(model.trainable_params(), 1e-2)
    steps = follow(model, optimizer, scaler, listener)
    for _ in range(2):
        scaler.adjust(Tensor(False))
    optimizer(tuple(Tensor(np.zeros(p.shape, np.float32)) for p in optimizer.parameters))
    steps.close()
    assert told == ["skipped", "skipped", "update"]


def test_a_rank_that_is_left_out_may_say_everything_where_the_ranks_do_not_meet(out, monkeypatch):
    monkeypatch.setenv("MS_WORKER_NUM", "2")
    monkeypatch.setenv("MS_NODE_ID", "1")
    monkeypatch.setenv("TRAINSENTRY_MEET_AT", "off")
    model = net(layers=1)
    optimizer = nn.SGD(model.trainable_params(), 1e-2)
    with watch(out, model, optimizer, ranks=[0]) as monitor:
        monitor.log(loss=1.0)
        train(model, optimizer, 2, None)
        monitor.step()
        monitor.step_ended()
        monitor.flush()
        with pytest.raises(RuntimeError, match="cannot agree on a stop"):
            monitor.request_stop("enough")
    assert not (out / "rank1").exists()


@pytest.mark.parametrize("named", ["host", "host:", ":80", "host:port"])
def test_a_place_to_meet_is_a_host_and_a_number(out, monkeypatch, named):
    monkeypatch.setenv("MS_WORKER_NUM", "2")
    monkeypatch.setenv("TRAINSENTRY_MEET_AT", named)
    model = net(layers=1)
    with pytest.raises(ValueError, match=r"TRAINSENTRY_MEET_AT.*host:port of rank 0, or off"):
        watch(out, model, None)


def test_a_compiled_step_may_adjust_its_loss_scaler(out):
    model = net(layers=1)
    optimizer = nn.Momentum(model.trainable_params(), 1e-2, 0.9)
    scaler = ms.amp.DynamicLossScaler(2.0**10, 2, 100)

    def forward(x, y):
        return scaler.scale(((model(x) - y) ** 2).mean())

    grad = ms.value_and_grad(forward, None, optimizer.parameters)

    @ms.jit
    def step(x, y):
        loss, grads = grad(x, y)
        grads = scaler.unscale(grads)
        optimizer(grads)
        scaler.adjust(ms.amp.all_finite(grads))
        return scaler.unscale(loss)

    monitor = trainsentry.TrainMonitor({"output_dir": str(out), "strict": True, "collect": EVERY_STEP})
    with monitor.watch(model, optimizer, grad_scaler=scaler):
        for x, y in batches(3):
            step(x, y)
            monitor.step()
        records = monitor.records()
    assert sorted(records.step.unique()) == [0, 1, 2]


def test_eager_steps_before_compiled_ones_are_no_reason_to_fail(out):
    model = net(layers=1)
    optimizer = nn.Momentum(model.trainable_params(), 1e-2, 0.9)
    loss_fn = nn.MSELoss()

    def forward(x, y):
        return loss_fn(model(x), y)

    grad = ms.value_and_grad(forward, None, optimizer.parameters)

    def step(x, y):
        loss, grads = grad(x, y)
        optimizer(grads)
        return loss

    compiled = ms.jit(step)
    with watch(out, model, optimizer) as monitor:
        for n, (x, y) in enumerate(batches(6)):
            (step if n < 2 else compiled)(x, y)
            monitor.step()
        records = monitor.records()
    assert sorted(records.step.unique()) == list(range(6))


def test_a_loop_after_model_train_ends_its_own_steps(out):
    from trainsentry.monitor.mindspore_callbacks import MonitorStep

    model = net()
    optimizer = nn.Momentum(model.trainable_params(), 1e-2, 0.9)
    with watch(out, model, optimizer) as monitor:
        ms.train.Model(model, nn.MSELoss(), optimizer).train(
            1, dataset(2), callbacks=[MonitorStep(monitor)], dataset_sink_mode=False
        )
        train(model, optimizer, 2, monitor)
        assert sorted(monitor.records().step.unique()) == [0, 1, 2, 3]


def test_ranks_that_do_not_know_of_each_other_refuse_to_stop_alone(out, monkeypatch):
    monkeypatch.setenv("MS_WORKER_NUM", "2")
    monkeypatch.setenv("MS_NODE_ID", "1")
    model = net(layers=1)
    optimizer = nn.SGD(model.trainable_params(), 1e-2)
    with pytest.raises(trainsentry.ConfigError, match="cannot agree on a stop"):
        watch(out, model, optimizer, on_incident={"stop": True})
    with watch(out, model, optimizer) as monitor:
        with pytest.raises(RuntimeError, match="cannot agree on a stop"):
            monitor.request_stop("enough")
        train(model, optimizer, 2, monitor)
    assert (out / "rank1" / "gradient_0-999.csv").exists()
    assert not (out / "run.json").exists()
