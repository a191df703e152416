"""A step that MindSpore's loss scaler skips is recorded as skipped, once, on every rank."""

from types import SimpleNamespace

import mindspore as ms
import numpy as np
from cells import EVERY_STEP, batches, net
from mindspore import Tensor, nn

import trainsentry
from trainsentry.collectors.mindspore.backend import follow
from trainsentry.collectors.mindspore.hooks.optimizer_steps import ScalerWatch


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
