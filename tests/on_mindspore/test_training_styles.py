"""MindSpore's ways to train give the same records: functional, TrainOneStepCell, Model.train, and compiled steps."""

import mindspore as ms
import numpy as np
import pytest
from cells import batches, dataset, net, train, watch, weights
from mindspore import nn, ops

from trainsentry.monitor.mindspore_callbacks import MonitorStep


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


@pytest.mark.parametrize("mode", [ms.PYNATIVE_MODE, ms.GRAPH_MODE])
def test_the_callback_of_model_train_ends_steps_and_logs_their_loss(out, mode):
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
    model = net()
    optimizer = nn.Momentum(model.trainable_params(), 1e-2, 0.9)
    with watch(out, model, optimizer) as monitor:
        ms.train.Model(model, nn.MSELoss(), optimizer).train(
            1, dataset(2), callbacks=[MonitorStep(monitor)], dataset_sink_mode=False
        )
        train(model, optimizer, 2, monitor)
        assert sorted(monitor.records().step.unique()) == [0, 1, 2, 3]


def test_models_of_a_list_that_share_names_are_told_apart(out):
    models = [net(layers=1), net(layers=1)]
    optimizers = [nn.SGD(model.trainable_params(), 1e-2) for model in models]
    with watch(out, models, optimizers) as monitor:
        for model, optimizer in zip(models, optimizers, strict=True):
            train(model, optimizer, 1)
        names = set(monitor.metrics("gradient"))
    assert {name.partition(".")[0] for name in names} == {"0", "1"}
    assert len(names) == len(list(models[0].get_parameters())) * 2
