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
