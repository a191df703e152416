"""PrecisionDebugger on MindSpore writes msprobe's names and fields, and leaves training unchanged."""

import json
import sys

import mindspore as ms
import numpy as np
import pytest
from cells import batches, net, train, weights
from mindspore import Tensor, nn

import trainsentry
from trainsentry import PrecisionDebugger


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
    assert set(found["data"]) == {"Cell.head.Dense.backward.0"}


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
    model(next(batches(1))[0])
    debugger.stop()
    with pytest.raises(trainsentry.OverflowLimitReached):
        debugger.step()
    found = json.loads((tmp_path / "dump" / "step0" / "rank0" / "dump.json").read_text())["data"]
    assert found["Cell.blocks.0.up.Dense.forward.0"]["overflow"] == "made"
    assert found["Cell.blocks.0.down.Dense.forward.0"]["overflow"] == "passed_on"
    assert "Cell.inp.Dense.forward.0" not in found


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
