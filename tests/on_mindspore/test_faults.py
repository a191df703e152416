"""Faults on MindSpore are found, and the first suspect is the culprit."""

import mindspore as ms
import numpy as np
import pytest
from cells import net, train
from mindspore import Tensor, nn

import trainsentry

STEP = 20
CELLS = ["inp", "blocks.0.up", "blocks.0.down", "blocks.1.norm", "blocks.1.up", "blocks.1.down", "blocks.2.norm",
         "blocks.2.up", "blocks.2.down", "head"]  # fmt: skip


def run(out, parameter, change, **config):
    """Train, change one weight before step STEP, and return the incidents."""
    model = net()
    optimizer = nn.Adam(model.trainable_params(), 3e-3)
    by_name = dict(model.parameters_and_names())

    def before_step(n):
        if n == STEP:
            values = by_name[parameter].asnumpy().copy()
            change(values)
            ms.ops.assign(by_name[parameter], Tensor(values))

    with trainsentry.TrainMonitor({"output_dir": str(out), "strict": True, **config}).watch(
        model, optimizer
    ) as monitor:
        train(model, optimizer, STEP + 3, monitor, before_step)
    return monitor.incidents


def flip(values):
    """Flip the highest bit of the exponent of the element whose bit is not set."""
    flat = values.reshape(-1).view(np.uint32)
    flat[int(np.argmax(np.abs(values.reshape(-1))))] ^= np.uint32(1 << 30)


def plant_nan(values):
    values.reshape(-1)[0] = np.nan


ONE_OF_A_KIND = ["inp", "blocks.1.norm", "blocks.1.up", "blocks.1.down", "head"]


@pytest.mark.parametrize(("cell", "change"), [*((c, flip) for c in CELLS), *((c, plant_nan) for c in ONE_OF_A_KIND)])
def test_the_first_suspect_is_the_broken_weight(out, cell, change):
    name = f"{cell}.gamma" if cell.endswith("norm") else f"{cell}.weight"
    incidents = run(out, name, change)
    assert incidents
    assert incidents[0].name.rpartition(".")[0] == cell or incidents[0].name == name
    assert incidents[0].first_seen == STEP


def test_a_clean_run_raises_nothing(out):
    model = net()
    optimizer = nn.Adam(model.trainable_params(), 3e-3)
    with trainsentry.TrainMonitor({"output_dir": str(out)}).watch(model, optimizer) as monitor:
        train(model, optimizer, 60, monitor)
    assert monitor.incidents == ()


def test_an_incident_dumps_the_suspects_tensors_in_msprobes_words(out):
    run(out, "blocks.1.up.weight", plant_nan, on_incident={"dump": {"steps": 1}})
    dump, later = sorted(out.glob("dump/*/rank0/dump.json"))
    assert "Cell.blocks.1.up.Dense.backward.0" in later.read_text()
    text = dump.read_text()
    assert '"framework": "mindspore"' in text
    assert "Cell.blocks.1.up.Dense.forward.0" in text
    assert "mindspore.Tensor" in text
    files = list(dump.parent.glob("dump_tensor_data/*.npy"))
    assert any(np.isnan(np.load(f, allow_pickle=False)).any() for f in files)


def test_a_stop_comes_before_the_update_of_the_broken_step(out):
    with pytest.raises(trainsentry.TrainingStopped) as stopped:
        run(out, "blocks.1.up.weight", plant_nan, on_incident={"stop": True})
    assert stopped.value.step == STEP


def test_overflows_are_counted_and_end_the_run(out):
    with pytest.raises(trainsentry.OverflowLimitReached) as stopped:
        run(out, "blocks.1.up.weight", plant_nan, overflow_check={"overflow_nums": 2})
    assert stopped.value.step == STEP + 1


class _Places(nn.Cell):
    """Adds a table of positions that its author has made without a gradient, or one that a layer should learn."""

    def __init__(self, *, is_layer):
        super().__init__()
        self.places = ms.Parameter(Tensor(np.ones((1, 8), np.float32)), name="places", requires_grad=False)
        self.table = nn.Embedding(1, 8)
        self.table.embedding_table.requires_grad = not is_layer
        self.body = nn.SequentialCell(*[nn.Dense(8, 8) for _ in range(6)])

    def construct(self, x):
        return self.body(x + self.places + self.table(ms.ops.zeros((1,), ms.int32)))


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_constant_that_a_cell_makes_is_no_fault_and_a_layer_that_does_not_learn_is(out, is_frozen):
    model = _Places(is_layer=is_frozen)
    optimizer = nn.Adam(model.trainable_params(), 3e-3)
    x = Tensor(np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32))
    step = ms.value_and_grad(lambda: (model(x) - x).square().mean(), None, optimizer.parameters)
    config = {"output_dir": str(out), "collect": {"updates": {"every": 1}, "parameters": {"every": 1}}}
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        for _ in range(14):
            optimizer(step()[1])
    assert [i.name for i in monitor.incidents if i.kind == "frozen"] == ["table.embedding_table"] * is_frozen
