"""free_benchmark on MindSpore finds results that a small change overturns, and leaves the training as it is."""

import csv
import gc
import json
import math
import weakref

import mindspore as ms
import numpy as np
import pytest
from cells import batches, net, weights
from mindspore import Parameter, Tensor, mint, nn, ops

from trainsentry import ConfigError, PrecisionDebugger
from trainsentry.collectors.calls.free_benchmark import COLUMNS
from trainsentry.collectors.mindspore.calls import debugging

MODES = ["improve_precision", "add_noise", "bit_noise", "change_value", "no_change", "to_cpu"]


def configured(folder, **settings):
    """Return a debugger for the task; `to_cpu` is asked for with its device."""
    if settings.get("pert_mode") == "to_cpu" and "fuzz_device" not in settings:
        settings["fuzz_device"] = "cpu"
    path = folder / "config.json"
    whole = {"task": "free_benchmark", "dump_path": str(folder / "out"), "free_benchmark": settings}
    path.write_text(json.dumps(whole))
    return PrecisionDebugger(str(path), framework="mindspore")


def benchmark(folder, body, steps=1, functions=(), **settings):
    """Run `body` under the task; return the table's rows as mappings, and the watcher."""
    debugger = configured(folder, **settings)
    watcher = debugger._session.watcher
    for name, function in functions:
        setattr(math, name, function)
        debugger.register_custom_api(math, name)
    try:
        for _ in range(steps):
            debugger.start()
            body()
            debugger.stop()
            debugger.step()
        assert debugger._session.guard.failures == {}
    finally:
        for name, _ in functions:
            debugger.restore_custom_api(math, name)
            delattr(math, name)
        debugger.close()
    table = folder / "out" / "free_benchmark.csv"
    return (list(csv.DictReader(table.open())) if table.exists() else []), watcher


@ms.jit
def compiled(x):
    return ops.relu(x) * 2


def train(debugger=None, steps=2):
    """Train with everything that a repetition could disturb: dropout, batch norm, writes in place, a compiled part."""
    ms.set_seed(5)
    model = net(layers=1)
    norm, drop = nn.BatchNorm1d(2), nn.Dropout(p=0.5)
    norm.set_train()
    drop.set_train()
    count = Parameter(Tensor(np.zeros(2, np.float32)), name="count")
    parameters = [*model.trainable_params(), *norm.trainable_params()]
    optimizer = nn.Momentum(parameters, 1e-2, 0.9)

    def body(x, y):
        h = norm(model(x))
        h = drop(h) + ops.dropout(h, 0.5) + compiled(h)
        half = h.astype(ms.float16)
        h = (half + half * 0.1).astype(ms.float32)
        ops.assign_add(count, h.sum(0))
        b = h * 1
        b.add_(1.0)
        h = h + b + ops.standard_normal(h.shape, 7) * 0.01
        h = ops.concat([h, mint.exp(h * 0.1)], 1) @ ops.ones((4, 2)) * 1e-3
        return ops.mse_loss(h, y) + ops.softmax(h, 0).max()

    grad = ms.value_and_grad(body, None, parameters)
    losses = []
    for x, y in batches(steps):
        if debugger is not None:
            debugger.start(model)
        loss, gradients = grad(x, y)
        optimizer(gradients)
        if debugger is not None:
            debugger.stop()
            debugger.step()
        losses.append(loss.asnumpy().copy())
    drawn = [np.random.rand(), ops.uniform((2,), Tensor(0.0, ms.float32), Tensor(1.0, ms.float32)).asnumpy()]
    state = [norm.moving_mean, norm.moving_variance, count, *norm.trainable_params()]
    return [*losses, *weights(model), *[p.asnumpy().copy() for p in state], *drawn]


@pytest.fixture(scope="module")
def bare():
    return train()


@pytest.mark.parametrize("stage", ["forward", "backward"])
@pytest.mark.parametrize("mode", MODES)
def test_training_is_equal_to_the_bit(tmp_path, bare, mode, stage):
    before = mint.add, ops.relu, Tensor.__add__, type(ms.common.api._pynative_executor).grad
    debugger = configured(tmp_path, pert_mode=mode, fuzz_stage=stage)
    found = train(debugger)
    assert debugger._session.guard.failures == {}
    done = debugger._session.watcher
    debugger.close()
    assert all(np.array_equal(a, b) for a, b in zip(found, bare, strict=True))
    assert before == (mint.add, ops.relu, Tensor.__add__, type(ms.common.api._pynative_executor).grad)
    assert done.checked > (10 if mode != "improve_precision" else 2)
    assert done.left_out["that run compiled functions"] == 2


def test_random_calls_are_left_out_with_the_reason(tmp_path):
    x = Tensor(np.ones((2, 3), np.float16))

    def body():
        ops.dropout(x, 0.5)
        ops.relu(x)

    _, done = benchmark(tmp_path, body, pert_mode="no_change")
    assert (done.checked, dict(done.left_out)) == (1, {"that draw random numbers": 1})


@pytest.mark.parametrize(("stage", "good"), [("forward", 1), ("backward", 1), ("backward", 2)])
def test_a_call_that_only_the_repetition_cannot_make_does_not_end_the_recording(tmp_path, stage, good):
    calls = []

    def narrow(x):
        calls.append(x)
        return ops.relu(x) if len(calls) % (good + 1) else mint.nn.functional.gelu(x)

    x = Tensor(np.arange(1, 4).astype(np.float16))
    found = []

    def body():
        found.append(ms.grad(lambda x: (math.narrow(x) * 2).sum())(x).asnumpy().tolist())

    settings = {"pert_mode": "no_change", "fuzz_stage": stage, "list": ["narrow"]}
    _, done = benchmark(tmp_path, body, steps=2, functions=[("narrow", narrow)], **settings)
    assert found == [[2.0, 2.0, 2.0]] * 2
    assert done.left_out["failed again (RuntimeError)"] == 2


def test_a_call_that_differs_from_time_to_time_has_a_row(tmp_path):
    times = iter(range(1, 100))
    rows, _ = benchmark(
        tmp_path,
        lambda: math.unsteady(Tensor(np.ones((2, 3), np.float32))),
        steps=2,
        functions=[("unsteady", lambda x: x * next(times))],
        pert_mode="no_change",
    )
    assert tuple(rows[0]) == tuple("pert_type" if name == "pert_mode" else name for name in COLUMNS)
    assert [(r["step"], r["api_name"], r["shape"]) for r in rows] == [(n, "math.unsteady.0", "[2, 3]") for n in "01"]
    assert [float(r["max_rel"]) for r in rows] == pytest.approx([1.0, 4 / 3 - 1])
    assert (rows[0]["rank"], rows[0]["pert_type"], rows[0]["stage"]) == ("0", "no_change", "forward")
    assert rows[0]["dtype"] == "Float32"


def lossy(x):
    return (x + 1024) - 1024


@pytest.mark.parametrize("stage", ["forward", "backward"])
@pytest.mark.parametrize("mode", ["improve_precision", "to_cpu"])
def test_what_half_precision_loses_is_found_by_a_higher_one(tmp_path, mode, stage):
    x = Tensor(np.linspace(0.1, 1, 64).astype(np.float16))

    def body():
        ms.grad(lambda x: (math.lossy(x) + x * 2).max())(x)

    functions = [("lossy", lossy)]
    rows, done = benchmark(tmp_path, body, functions=functions, pert_mode=mode, fuzz_stage=stage)
    assert {r["api_name"] for r in rows} == ({"math.lossy.0"} if stage == "forward" else set())
    assert done.checked >= 3


def test_a_backward_pass_that_differs_has_a_row(tmp_path):
    times = iter(range(1, 100))

    def unsteady(x):
        y = x * 1.0
        return y + (y - ops.stop_gradient(y)) * next(times)

    def body():
        ms.grad(lambda x: (math.unsteady(x) * 2).sum())(Tensor(np.ones(2, np.float32)))

    settings = {"pert_mode": "no_change", "fuzz_stage": "backward"}
    rows, done = benchmark(tmp_path, body, functions=[("unsteady", unsteady)], **settings)
    assert [(r["stage"], r["api_name"], r["max_rel"]) for r in rows] == [("backward", "math.unsteady.0", "1.0")]
    assert done.checked == 3


def test_fix_hands_on_the_more_exact_result_with_its_gradient_once_the_call_was_tried(tmp_path):
    x = Tensor(np.linspace(0.1, 1, 64).astype(np.float16))
    found = []

    def body():
        def loss(x):
            y = math.lossy(x)
            found.append(y)
            return (y * 3).sum()

        found.append(ms.grad(loss)(x))

    rows, done = benchmark(tmp_path, body, steps=2, functions=[("lossy", lossy)], handler_type="fix")
    first, _, second, gradient = found
    assert (first.dtype, second.dtype) == (ms.float16, ms.float16)
    assert np.array_equal(first.asnumpy(), lossy(x).asnumpy())
    assert np.array_equal(second.asnumpy(), lossy(x.astype(ms.float32)).astype(ms.float16).asnumpy())
    assert not np.array_equal(first.asnumpy(), second.asnumpy())
    assert np.array_equal(gradient.asnumpy(), np.full(64, 3, np.float16))
    assert (rows, done.left_out["to be tried first"]) == ([], 3)


def test_fix_is_at_once_where_nothing_is_recorded_and_never_of_a_view_or_a_refused_call(tmp_path):
    x = Tensor(np.linspace(0.1, 1, 64).astype(np.float16))
    found = {}

    def body():
        found["y"] = math.lossy(x)
        found["view"] = x.view(8, 8)
        ops.dropout(x, 0.5)

    _, done = benchmark(tmp_path, body, functions=[("lossy", lossy)], handler_type="fix")
    assert np.array_equal(found["y"].asnumpy(), lossy(x.astype(ms.float32)).astype(ms.float16).asnumpy())
    assert found["view"].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert (done.checked, done.left_out["that return a view"], done.left_out["that draw random numbers"]) == (1, 1, 1)


def test_a_weight_gets_its_gradient_through_a_fixed_call(tmp_path):
    w = Parameter(Tensor(np.linspace(0.1, 1, 8).astype(np.float16)), name="w")
    x = Tensor(np.ones(8, np.float16))
    found = []

    def body():
        found.append(ms.value_and_grad(lambda x: (w * x * 3).sum(), None, [w])(x)[1][0].asnumpy())

    _, done = benchmark(tmp_path, body, steps=2, handler_type="fix")
    assert done.checked >= 2
    assert np.array_equal(found[0], found[1])
    assert found[1].tolist() == [3.0] * 8


def test_only_the_calls_that_are_asked_for_are_repeated(tmp_path):
    def body():
        x = Tensor(np.ones(4, np.float32))
        x * 2
        ops.exp(x)
        ops.exp(x)
        x - 1

    scope = {"scope": ["Functional.exp.1.forward", "Tensor.__sub__.0.forward"]}
    for chosen, count in (({"list": ["exp"]}, 2), (scope, 2)):
        _, done = benchmark(tmp_path, body, pert_mode="no_change", **chosen)
        assert done.checked == count


def test_arguments_that_change_before_the_repetition_are_left_out(tmp_path):
    w = Parameter(Tensor(np.ones(3, np.float32)), name="w")

    def body():
        def loss(x):
            y = x * w
            ops.assign_add(w, Tensor(np.ones(3, np.float32)))
            return y.sum()

        ms.grad(loss)(Tensor(np.ones(3, np.float32)))

    _, done = benchmark(tmp_path, body, pert_mode="no_change", list=["__mul__", "sum"])
    assert w.asnumpy().tolist() == [2.0] * 3
    assert (done.checked, dict(done.left_out)) == (1, {"whose arguments have changed since": 1})


@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_no_tensor_is_kept_once_the_step_is_over(tmp_path, stage):
    alive = []

    def body():
        def loss(x):
            y = x * 2
            alive.append(weakref.ref(y))
            return y.sum()

        ms.grad(loss)(Tensor(np.ones(4, np.float32)))

    benchmark(tmp_path, body, pert_mode="no_change", fuzz_stage=stage)
    gc.collect()
    assert [r() is not None for r in alive] == [False]


def test_a_step_that_is_stopped_before_its_backward_pass_is_compared_after_it(tmp_path):
    debugger = configured(tmp_path, pert_mode="no_change")
    watcher = debugger._session.watcher
    debugger.start()
    _, backward = ms.vjp(ops.exp, Tensor(np.ones(3, np.float32)))
    debugger.stop()
    assert watcher.checked == 0
    backward(Tensor(np.ones(3, np.float32)))
    assert watcher.checked == 1
    debugger.step()
    debugger.start()
    ms.vjp(ops.exp, Tensor(np.ones(3, np.float32)))
    debugger.stop()
    debugger.step()
    assert watcher.left_out["whose backward pass has not come"] == 1
    debugger.close()


def test_while_it_preheats_no_row_is_written(tmp_path):
    def body():
        x = Tensor(np.linspace(0, 1, 64).astype(np.float32))
        ops.exp(x) - ops.exp(x[::-1])

    settings = {"pert_mode": "change_value", "if_preheat": True, "preheat_step": 2, "max_sample": 1}
    rows, _ = benchmark(tmp_path, body, steps=4, **settings)
    assert {r["step"] for r in rows} == {"2", "3"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fuzz_device": "cpu", "pert_mode": "to_cpu"}, "fuzz_device: 'cpu' with MindSpore beside a device"),
        ({"pert_mode": "add_noise", "if_preheat": True}, "if_preheat: True with MindSpore beside a device"),
    ],
)
def test_what_needs_the_cpu_is_refused_beside_a_device(tmp_path, monkeypatch, settings, message):
    monkeypatch.setattr(debugging, "on_host", lambda: False)
    with pytest.raises(ConfigError, match=message):
        configured(tmp_path, **settings)


def test_combinations_without_a_meaning_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="pert_mode: 'add_noise' with handler_type 'fix'; allowed: improve_precision"):
        configured(tmp_path, pert_mode="add_noise", handler_type="fix")
    ms.set_context(mode=ms.GRAPH_MODE)
    with pytest.raises(ConfigError, match="task: 'free_benchmark' in GRAPH_MODE, which calls no operations"):
        configured(tmp_path)
