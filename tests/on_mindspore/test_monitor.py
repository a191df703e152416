"""The monitor changes nothing in MindSpore's training, names mistakes, and leaves cells as they were."""

import copy
import json
import subprocess
import sys

import mindspore as ms
import numpy as np
import pytest
from cells import net, train, watch, weights
from mindspore import Tensor, nn

import trainsentry

ASYNCHRONOUS = True

OPTIMIZERS = {
    "Adam": lambda p: nn.Adam(p, 1e-2),
    "AdamWeightDecay": lambda p: nn.AdamWeightDecay(p, 1e-2),
    "Momentum": lambda p: nn.Momentum(p, 1e-2, 0.9),
    "SGD": lambda p: nn.SGD(p, 1e-2, momentum=0.9),
    "experimental.AdamW": lambda p: ms.experimental.optim.AdamW(p, lr=1e-2),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_is_the_same_to_the_bit(out, kind):
    model = net()
    bare, wanted = train(model, OPTIMIZERS[kind](model.trainable_params()), 6), weights(model)
    model = net()
    optimizer = OPTIMIZERS[kind](model.trainable_params())
    with watch(out, model, optimizer) as monitor:
        assert train(model, optimizer, 6, monitor) == bare
    assert all(np.array_equal(a, b) for a, b in zip(weights(model), wanted, strict=True))


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
    inner = [cell for name, cell in model.cells_and_names() if name]  # the inputs of the model itself are always read
    classes = [type(cell) for cell in inner]
    with watch(out, model, optimizer, collect={"activations": {"every": 2}}) as monitor:
        train(model, optimizer, 1, monitor)
        assert [type(cell) for cell in inner] == classes
        train(model, optimizer, 1, monitor)
        assert [type(cell) for cell in inner] != classes


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
