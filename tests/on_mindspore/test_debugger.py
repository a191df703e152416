"""PrecisionDebugger on MindSpore writes msprobe's names and fields, and leaves training unchanged."""

import json
import subprocess
import sys

import mindspore as ms
import numpy as np
import pytest
from cells import batches, net, train, weights
from mindspore import Tensor, nn

import trainsentry
from trainsentry import PrecisionDebugger

ASYNCHRONOUS = True


def dump(tmp_path, task, level="L0", steps=1, **config):
    """Train with a debugger; return the dump of the first step."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"task": task, "dump_path": str(tmp_path / "dump"), "level": level, **config}))
    model = net(layers=1)
    optimizer = nn.Momentum(model.trainable_params(), 1e-2, 0.9)
    debugger = PrecisionDebugger(str(path))
    loss_fn = nn.MSELoss()
    grad = ms.value_and_grad(lambda x, y: loss_fn(model(x), y), None, optimizer.parameters)
    for x, y in batches(steps):
        debugger.start(model)
        _, grads = grad(x, y)
        optimizer(grads)
        debugger.stop()
        debugger.step()
    file = tmp_path / "dump" / "step0" / "rank0" / "dump.json"
    return json.loads(file.read_text()), model


def test_entries_have_msprobes_names_and_words(tmp_path):
    found, _ = dump(tmp_path, "statistics")
    assert (found["framework"], found["level"], found["dump_data_dir"]) == ("mindspore", "L0", None)
    names = list(found["data"])
    assert names[:2] == ["Cell.inp.Dense.forward.0", "Cell.blocks.0.norm.LayerNorm.forward.0"]
    entry = found["data"]["Cell.head.Dense.forward.0"]
    assert set(entry) == {"input_args", "input_kwargs", "output", "parameters"}
    [tensor] = entry["output"]
    assert (tensor["type"], tensor["dtype"], tensor["shape"]) == ("mindspore.Tensor", "Float32", [16, 2])
    assert "requires_grad" not in tensor
    assert set(entry["parameters"]) == {"weight", "bias"}
    backward = found["data"]["Cell.head.Dense.backward.0"]
    assert backward["input"][0]["shape"] == [16, 2]
    assert backward["output"][0]["shape"] == [16, 8]
    construct = json.loads((tmp_path / "dump" / "step0" / "rank0" / "construct.json").read_text())
    assert construct["Cell.blocks.0.up.Dense.forward.0"] == "Cell.blocks.0.Block.forward.0"


def test_tensors_are_numpys_files_with_the_values_that_passed(tmp_path):
    found, _ = dump(tmp_path, "tensor")
    folder = tmp_path / "dump" / "step0" / "rank0" / "dump_tensor_data"
    entry = found["data"]["Cell.head.Dense.forward.0"]
    x = np.load(folder / "Cell.head.Dense.forward.0.input.0.npy", allow_pickle=False)
    y = np.load(folder / entry["output"][0]["data_name"], allow_pickle=False)
    w = np.load(folder / "Cell.head.Dense.forward.0.parameters.weight.npy", allow_pickle=False)
    b = np.load(folder / "Cell.head.Dense.forward.0.parameters.bias.npy", allow_pickle=False)
    assert np.allclose(x @ w.T + b, y, atol=1e-5)
    assert entry["output"][0]["Max"] == pytest.approx(float(y.max()))
    d_y = np.load(folder / "Cell.head.Dense.backward.0.input.0.npy", allow_pickle=False)
    d_x = np.load(folder / "Cell.head.Dense.backward.0.output.0.npy", allow_pickle=False)
    assert np.allclose(d_y @ w, d_x, atol=1e-6)


def test_bfloat16_is_written_as_float32_which_holds_it_exactly(tmp_path):
    from trainsentry.collectors.mindspore.saving import load_tensor, save_tensor

    tensor = Tensor(np.linspace(-3, 3, 8).astype(np.float32)).astype(ms.bfloat16)
    save_tensor(tensor, tmp_path / "t.npy")
    back = load_tensor(tmp_path / "t.npy")
    assert str(back.dtype) == "Float32"
    assert np.array_equal(back.asnumpy(), tensor.astype(ms.float32).asnumpy())


def test_structure_holds_names_alone(tmp_path):
    dump_path = tmp_path / "dump" / "step0" / "rank0"
    found, _ = dump(tmp_path, "structure")
    assert found["data"] == {}
    assert "Cell.head.Dense.forward.0" in json.loads((dump_path / "construct.json").read_text())


def test_lists_and_directions_narrow_what_is_written(tmp_path):
    found, _ = dump(tmp_path, "statistics", statistics={"list": ["head"], "data_mode": ["backward"]})
    assert set(found["data"]) == {"Cell.head.Dense.backward.0", "Cell.head.Dense.parameters_grad"}


def test_steps_that_are_not_asked_for_cost_nothing_and_change_nothing(tmp_path):
    found, _ = dump(tmp_path, "statistics", steps=3, step=[0])
    assert found["data"]
    assert [p.name for p in (tmp_path / "dump").iterdir()] == ["step0"]


def test_training_is_the_same_to_the_bit(tmp_path):
    model = net(layers=1)
    train(model, nn.Momentum(model.trainable_params(), 1e-2, 0.9), 3)
    wanted = weights(model)
    _, model = dump(tmp_path, "tensor", steps=3)
    assert all(np.array_equal(a, b) for a, b in zip(weights(model), wanted, strict=True))


def test_overflows_are_told_apart_and_stop_the_run(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                "task": "overflow_check",
                "dump_path": str(tmp_path / "dump"),
                "level": "L0",
                "overflow_check": {"overflow_nums": 2},
            }
        )
    )
    model = net(layers=1)
    values = model.blocks[0].up.weight.asnumpy().copy()
    values[0, 0] = np.inf
    ms.ops.assign(model.blocks[0].up.weight, Tensor(values))
    debugger = PrecisionDebugger(str(path))
    debugger.start(model)
    with pytest.raises(trainsentry.OverflowLimitReached):  # at the second call
        model(next(batches(1))[0])
    debugger.close()
    found = json.loads((tmp_path / "dump" / "step0" / "rank0" / "dump.json").read_text())["data"]
    assert found["Cell.blocks.0.up.Dense.forward.0"]["overflow"] == "made"
    assert found["Cell.blocks.0.down.Dense.forward.0"]["overflow"] == "passed_on"
    assert len(found) == 2


def test_saved_variables_and_token_ranges(tmp_path):
    debugger = PrecisionDebugger(task="tensor", dump_path=str(tmp_path / "d"), level="debug", framework="mindspore")
    debugger.start()
    debugger.save({"a": Tensor(np.ones(3, np.float32)), "b": 2}, "mine", save_backward=False)
    debugger.step()
    data = json.loads((tmp_path / "d" / "step0" / "rank0" / "debug.json").read_text())["data"]
    assert data["mine.0.debug"]["b"] == {"type": "int", "value": 2}
    assert (tmp_path / "d" / "step0" / "rank0" / "dump_tensor_data" / "mine.0.debug.a.npy").is_file()
    PrecisionDebugger.close()
    model = net(layers=1)
    debugger = PrecisionDebugger(task="statistics", dump_path=str(tmp_path / "t"), level="L0")
    debugger.start(model, token_range=[1, 2])
    for _ in range(5):
        model(Tensor(np.ones((2, 4), np.float32)))
    debugger.stop()
    debugger.step()
    data = json.loads((tmp_path / "t" / "step0" / "rank0" / "dump.json").read_text())["data"]
    assert [name for name in data if name.startswith("Cell.head")] == [f"Cell.head.Dense.forward.{n}" for n in range(2)]


def test_gradients_at_saved_variables_are_written_also_where_compiled_functions_use_them(tmp_path):
    script = tmp_path / "script.py"  # graphs are compiled from a file's source
    script.write_text(SAVED)
    subprocess.run([sys.executable, script, tmp_path / "d"], check=True, timeout=120)
    data = json.loads((tmp_path / "d" / "step0" / "rank0" / "debug.json").read_text())["data"]
    assert data["mine_grad.0.debug"]["b"] is None
    assert (data["mine_grad.0.debug"]["a"]["Max"], data["one_grad.0.debug"]["Max"]) == (6.0, 4.0)
    assert "quiet_grad.0.debug" not in data
    file = tmp_path / "d" / "step0" / "rank0" / "dump_tensor_data" / data["mine_grad.0.debug"]["a"]["data_name"]
    assert np.load(file).tolist() == [6.0] * 3


SAVED = """
import sys
import mindspore as ms, numpy as np
from mindspore import Tensor
from trainsentry import PrecisionDebugger

debugger = PrecisionDebugger(task="tensor", dump_path=sys.argv[1], level="debug", framework="mindspore")

@ms.jit
def compiled(x):
    return x * 2

def body(x):
    a = x * 3
    debugger.save({"a": a, "b": 2}, "mine")
    one = a * 1.5
    debugger.save(one, "one")
    debugger.save(one + 1, "quiet", save_backward=False)
    return (compiled(one) * 2).sum()

debugger.start()
value, gradient = ms.value_and_grad(body)(Tensor(np.ones(3, np.float32)))
assert gradient.asnumpy().tolist() == [18.0] * 3, gradient
debugger.stop()
debugger.step()
assert ms.value_and_grad(body)(Tensor(np.ones(3, np.float32)))[1].asnumpy().tolist() == [18.0] * 3
"""


@pytest.mark.parametrize("level", ["L0", "mix"])
def test_gradients_of_parameters_stand_beside_the_backward_pass(tmp_path, level):
    found, model = dump(tmp_path, "tensor", level=level)
    entry = found["data"]["Cell.head.Dense.parameters_grad"]
    assert set(entry) == {"weight", "bias"}
    folder = tmp_path / "dump" / "step0" / "rank0" / "dump_tensor_data"
    d_y = np.load(folder / "Cell.head.Dense.backward.0.input.0.npy")
    x = np.load(folder / "Cell.head.Dense.forward.0.input.0.npy")
    assert np.allclose(np.load(folder / entry["weight"][0]["data_name"]), d_y.T @ x, atol=1e-6)
    assert entry["bias"][0]["data_name"] == "Cell.head.Dense.parameters_grad.bias.npy"
    PrecisionDebugger.close()
    again = ms.value_and_grad(lambda x: model(x).sum(), None, model.trainable_params())
    again(next(batches(1))[0])
    assert json.loads((folder.parent / "dump.json").read_text()) == found


def test_a_compiled_step_is_left_alone(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(COMPILED)
    for level in ("L0", "mix"):
        subprocess.run([sys.executable, script, tmp_path / level, level], check=True, timeout=120)
        data = json.loads((tmp_path / level / "step0" / "rank0" / "dump.json").read_text())["data"]
        assert "Cell.0.Dense.forward.0" in data


COMPILED = """
import sys
import mindspore as ms, numpy as np
from mindspore import Tensor, nn
from trainsentry import PrecisionDebugger

net = nn.SequentialCell(nn.Dense(2, 2), nn.ReLU())
optimizer = nn.SGD(net.trainable_params(), 1e-2)
gradient = ms.value_and_grad(lambda x: net(x).sum(), None, optimizer.parameters)
def forward(x):
    return net(x).sum()
inner = ms.value_and_grad(forward, None, optimizer.parameters)

@ms.jit
def step(x):
    return inner(x)

x = Tensor(np.ones((1, 2), np.float32))
debugger = PrecisionDebugger(task="statistics", dump_path=sys.argv[1], level=sys.argv[2], framework="mindspore")
debugger.start(net)
gradient(x)
step(x)
gradient(x)
debugger.stop()
debugger.step()
"""


@pytest.mark.parametrize(("level", "name"), [("L0", "Cell.blocks.0.up.Dense"), ("mix", "Mint"), ("L1", "Functional")])
def test_the_tensors_of_overflowing_calls_are_saved_at_every_level(tmp_path, level, name):
    path = tmp_path / "config.json"
    settings = {"task": "overflow_check", "level": level, "overflow_check": {"overflow_nums": -1}}
    path.write_text(json.dumps({"dump_path": str(tmp_path / "d"), **settings}))
    model = net(layers=1)
    debugger = PrecisionDebugger(str(path))
    debugger.start(model)
    ms.ops.exp(Tensor(np.full(3, 200.0, np.float32)))
    ms.mint.exp(Tensor(np.full(3, 200.0, np.float32)))
    model(next(batches(1))[0] * np.inf)
    debugger.stop()
    debugger.step()
    folder = tmp_path / "d" / "step0" / "rank0"
    data = json.loads((folder / "dump.json").read_text())["data"]
    assert any(call.startswith(name) for call in data)
    for call, entry in data.items():
        for facts in entry["input_args"] + entry["output"]:
            if "dtype" in facts:
                assert np.load(folder / "dump_tensor_data" / facts["data_name"]).shape == tuple(facts["shape"]), call


def test_callbacks_dump_the_steps_of_model_train(tmp_path):
    from trainsentry.monitor.mindspore_callbacks import MsprobeInitStep, MsprobeStep

    model = net(layers=1)
    optimizer = nn.Momentum(model.trainable_params(), 1e-2, 0.9)
    data = [(x.asnumpy(), y.asnumpy()) for x, y in batches(3)]
    debugger = PrecisionDebugger(task="statistics", dump_path=str(tmp_path / "d"), level="L0", step=[1])
    ms.train.Model(model, nn.MSELoss(), optimizer).train(
        1,
        ms.dataset.GeneratorDataset(data, ["x", "y"], shuffle=False),
        callbacks=[MsprobeInitStep(), MsprobeStep(debugger)],
        dataset_sink_mode=False,
    )
    assert [p.name for p in (tmp_path / "d").iterdir()] == ["step1"]
    assert json.loads((tmp_path / "d" / "step1" / "rank0" / "dump.json").read_text())["data"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"level": "L0", "task": "run_ut"}, "run_ut"),
        ({"level": "L0", "task": "free_benchmark"}, "level: 'L0' with task 'free_benchmark'; allowed: L1"),
        ({"level": "L1", "task": "run_ut"}, "'run_ut' with MindSpore; allowed: with PyTorch"),
        ({"level": "L0", "framework": "jax"}, "'jax'"),
    ],
)
def test_what_there_is_not_for_mindspore_is_said(tmp_path, arguments, named):
    with pytest.raises(trainsentry.ConfigError, match=named):
        PrecisionDebugger(**{"task": "statistics", "dump_path": str(tmp_path), **arguments})


def test_with_both_frameworks_imported_one_has_to_be_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", object())
    with pytest.raises(trainsentry.ConfigError, match="allowed: one of them"):
        PrecisionDebugger(task="statistics", dump_path=str(tmp_path), level="L0")
    assert PrecisionDebugger(task="statistics", dump_path=str(tmp_path), level="L0", framework="mindspore")


def test_seeds_make_weights_and_dropout_the_same():
    def drawn():
        trainsentry.seed_all(7)
        return [
            nn.Dense(4, 4).weight.asnumpy().copy(),
            nn.Dropout(p=0.5).set_train()(Tensor(np.ones(64, np.float32))).asnumpy(),
        ]

    first, second = drawn(), drawn()
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_every_form_of_dropout_keeps_everything_when_it_is_asked_to(tmp_path):
    script = tmp_path / "script.py"  # in a process of its own: it is for good
    script.write_text(DROPOUTS)
    subprocess.run([sys.executable, script], check=True, timeout=120)


DROPOUTS = """
import mindspore as ms, numpy as np, trainsentry
from mindspore import Tensor, mint, nn, ops

flat, deep = Tensor(np.ones((2, 3, 4, 4), np.float32)), Tensor(np.ones((2, 3, 4, 4, 4), np.float32))
early = ops.Dropout(0.5), ops.Dropout2D(0.5), ops.Dropout3D(0.5)
trainsentry.seed_all()  # the default keeps dropout
assert (early[0](flat)[0].asnumpy() == 0).any()
trainsentry.seed_all(rm_dropout=True)
calls = [(early[0], flat), (early[1], flat), (early[2], deep), (ops.Dropout2D(0.1), flat)]
for primitive, x in calls:
    y, mask = primitive(x)
    assert np.array_equal(y.asnumpy(), x.asnumpy()) and mask.asnumpy().all()
    assert np.array_equal(ms.grad(lambda x: primitive(x)[0].sum())(x).asnumpy(), x.asnumpy())
assert np.array_equal(ops.dropout(flat, 0.9).asnumpy(), flat.asnumpy())
assert np.array_equal(mint.nn.functional.dropout(flat, 0.9).asnumpy(), flat.asnumpy())
assert np.array_equal(nn.Dropout(p=0.9).set_train()(flat).asnumpy(), flat.asnumpy())
"""


def test_a_healthy_overflow_check_leaves_no_file(tmp_path):
    dump(tmp_path, "overflow_check", steps=2, overflow_check={"overflow_nums": -1})
    assert not list(tmp_path.rglob("*.npy"))


def test_gradients_at_nested_inputs_stand_apart(tmp_path):
    class Pair(nn.Cell):
        def __init__(self):
            super().__init__()
            self.fc = nn.Dense(4, 2)

        def construct(self, pair, scale):
            return self.fc(pair[0] * 2 + pair[1]) * scale

    class Outer(nn.Cell):
        def __init__(self):
            super().__init__()
            self.inp, self.pair = nn.Dense(4, 4), Pair()

        def construct(self, x):
            x = self.inp(x)
            return self.pair((x + 1, x * 3), scale=x.mean())

    model = Outer()
    optimizer = nn.SGD(model.trainable_params(), 1e-2)
    debugger = PrecisionDebugger(task="tensor", dump_path=str(tmp_path), level="L0")
    grad = ms.value_and_grad(lambda x: model(x).sum(), None, optimizer.parameters)
    debugger.start(model)
    grad(Tensor(np.ones((3, 4), np.float32)))
    debugger.stop()
    debugger.step()
    folder = tmp_path / "step0" / "rank0"
    entry = json.loads((folder / "dump.json").read_text())["data"]["Cell.pair.Pair.backward.0"]
    names = [tensor["data_name"] for tensor in entry["output"]]
    assert len(set(names)) == 3
    first, second = (np.load(folder / "dump_tensor_data" / name, allow_pickle=False) for name in names[:2])
    assert np.allclose(first, 2 * second)
