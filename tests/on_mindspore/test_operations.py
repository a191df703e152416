"""A dump names MindSpore's operations with msprobe's prefixes and gradients, and leaves nothing behind."""

import json
import threading

import mindspore as ms
import numpy as np
import pytest
from cells import batches, net
from mindspore import Tensor, mint, nn, ops

from trainsentry import PrecisionDebugger
from trainsentry.collectors.mindspore.calls import operations

ASYNCHRONOUS = True


@ms.jit
def part(a, b):
    return ops.relu(a) + mint.exp(b) * a.sum()


def forward(model, x, y):
    h = model(x)
    h = mint.nn.functional.relu(h) * 2 + h.abs() - 1
    h = h + part(h, h * 0.1)
    return ops.mse_loss(mint.concat([h, h], 0), mint.concat([y, y], 0)) + (1 - h[0]).mean()


def train(debugger=None, steps=2):
    """Train with Adam, whose update is compiled; return losses and weights."""
    model = net(layers=1)
    optimizer = nn.Adam(model.trainable_params(), 1e-2)
    grad = ms.value_and_grad(lambda x, y: forward(model, x, y), None, optimizer.parameters)
    losses = []
    for x, y in batches(steps):
        if debugger is not None:
            debugger.start(model)
        loss, gradients = grad(x, y)
        optimizer(gradients)
        if debugger is not None:
            debugger.stop()
            debugger.step()
        losses.append(float(loss.asnumpy()))
    return losses, [p.asnumpy() for p in model.trainable_params()]


def debugger(tmp_path, level, **config):
    path = tmp_path / "config.json"
    whole = {"task": "statistics", "dump_path": str(tmp_path / "dump"), "level": level, **config}
    path.write_text(json.dumps(whole))
    return PrecisionDebugger(str(path), framework="mindspore")


def content(tmp_path, name="dump.json"):
    found = json.loads((tmp_path / "dump" / "step0" / "rank0" / name).read_text())
    return found["data"] if name == "dump.json" else found


def test_operations_have_msprobes_prefixes_and_their_own_gradients(tmp_path):
    train(debugger(tmp_path, "L1"))
    found = content(tmp_path)
    forwards = [name for name in found if name.endswith(".forward")]
    assert forwards[:2] == ["Primitive.MatMul.0.forward", "Primitive.BiasAdd.0.forward"]
    for name in ("Functional.relu.0", "MintFunctional.relu.0", "Mint.concat.1", "Tensor.__add__.2", "Tensor.abs.0"):
        assert f"{name}.forward" in found
    assert not [name for name in found if name.startswith("Cell.") or "Shape" in name]
    concat = found["Mint.concat.0.forward"]
    assert [t["shape"] for t in concat["input_args"][0]] == [[16, 2], [16, 2]]
    residual = found["Tensor.__add__.0.backward"]
    assert [t["shape"] for t in residual["input"]] == [[16, 8]]
    assert [t["Norm"] for t in residual["output"]] == [residual["input"][0]["Norm"]] * 2
    mean = found["Tensor.mean.0.backward"]
    assert mean["input"][0]["Max"] == 1.0
    assert mean["output"][0]["Max"] == 0.5


def test_training_is_the_same_to_the_bit_and_everything_is_as_it_was(tmp_path):
    before = (mint.add, ops.relu, Tensor.__add__, vars(Tensor).get("__add__"), ops.ReLU.__call__)
    bare = train()
    for level in ("L1", "mix"):
        (tmp_path / level).mkdir()
        seen = train(debugger(tmp_path / level, level))
        assert seen[0] == bare[0]
        assert all(np.array_equal(a, b) for a, b in zip(seen[1], bare[1], strict=True))
        assert (mint.add, ops.relu, Tensor.__add__, vars(Tensor).get("__add__"), ops.ReLU.__call__) == before
        PrecisionDebugger.close()


def test_a_compiled_function_is_one_call_and_what_is_in_it_is_compiled_as_ever(tmp_path):
    @ms.jit
    def fresh(a):  # compiled while the dump is taken
        return mint.exp(a) + ops.relu(a).sum() * a

    x = Tensor(np.linspace(-1, 1, 8).astype(np.float32))
    recorder = debugger(tmp_path, "L1")
    recorder.start()
    seen = fresh(x)
    after = ops.relu(seen)
    recorder.stop()
    recorder.step()
    found = content(tmp_path)
    assert list(found) == ["Jit.fresh.0.forward", "Functional.relu.0.forward"]
    assert np.array_equal(seen.asnumpy(), fresh(x).asnumpy())
    assert after.shape == (8,)


def test_at_level_mix_operations_stand_under_their_cells(tmp_path):
    train(debugger(tmp_path, "mix"))
    parents = content(tmp_path, "construct.json")
    assert parents["Functional.relu.0.forward"] == "Cell.blocks.0.Block.forward.0"
    assert parents["Primitive.MatMul.0.forward"] == "Cell.inp.Dense.forward.0"
    assert parents["Functional.mse_loss.0.forward"] is None
    assert "Cell.head.Dense.forward.0" in content(tmp_path)


def test_the_operation_that_makes_a_nan_is_told_from_those_that_pass_it_on(tmp_path):
    recorder = debugger(tmp_path, "L1", task="overflow_check", overflow_check={"overflow_nums": -1})
    recorder.start()
    ops.relu(ops.log(Tensor(np.array([-1.0, 2.0], np.float32))) * 1.0)
    recorder.stop()
    recorder.step()
    found = {name: entry["overflow"] for name, entry in content(tmp_path).items()}
    assert found["Functional.log.0.forward"] == "made"
    assert found["Tensor.__mul__.0.forward"] == "passed_on"


class Library:
    """A place of a user's own functions."""

    @staticmethod
    def twice(x):
        return x * 2


def test_a_function_of_the_users_own_is_recorded_as_one_call(tmp_path):
    recorder = debugger(tmp_path, "L1")
    PrecisionDebugger.register_custom_api(Library, "twice", "Mine")
    with pytest.raises(AttributeError, match="no function 'thrice'"):
        PrecisionDebugger.register_custom_api(Library, "thrice")
    original = vars(Library)["twice"]
    recorder.start()
    Library.twice(Tensor([1.0]))
    Library().twice(Tensor([1.0]))
    recorder.stop()
    recorder.step()
    PrecisionDebugger.restore_custom_api(Library, "twice")
    assert list(content(tmp_path)) == ["Mine.twice.0.forward", "Mine.twice.1.forward"]
    assert vars(Library)["twice"] is original
    assert not operations._custom


def test_other_threads_and_errors_of_the_program_pass_unseen(tmp_path):
    recorder = debugger(tmp_path, "L1")
    recorder.start()
    other = threading.Thread(target=lambda: ops.tanh(Tensor([1.0])).asnumpy())
    other.start()
    other.join()
    with pytest.raises((ValueError, TypeError, RuntimeError)):
        ops.concat((Tensor([1.0]), Tensor([[1.0]])), 0).asnumpy()
    ops.relu(Tensor([1.0]))
    recorder.stop()
    recorder.step()
    assert list(content(tmp_path)) == ["Functional.relu.0.forward"]
