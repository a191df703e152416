"""Where torch is provided by MindSpore it is recognised by its layout, and dumps have torch's names."""

import json
import sys
import types

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn

from trainsentry import PrecisionDebugger, TrainMonitor
from trainsentry.collectors.mindspore.calls import operations
from trainsentry.collectors.shared.adapted_torch import adapted_torch


@pytest.fixture
def torch(monkeypatch):
    """A package laid out as MSAdapter's: its Tensor and Module are MindSpore's, its functions call mint's."""
    names = ("torch", "torch.nn", "torch.nn.functional", "torch.distributed")
    modules = {name: types.ModuleType(name) for name in names}
    whole = modules["torch"]
    whole.nn, whole.distributed = modules["torch.nn"], modules["torch.distributed"]
    whole.nn.functional = modules["torch.nn.functional"]
    whole.Tensor = Tensor
    whole.nn.Module = type("Module", (nn.Cell,), {"__module__": "torch.nn"})

    def relu(x):
        return mint.nn.functional.relu(x)

    def add(x, y):
        return mint.add(x, y)

    whole.nn.functional.relu, whole.add = relu, add
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(operations, "_known", [])
    yield whole
    PrecisionDebugger.close()


@pytest.fixture
def model(torch):
    class Linear(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = ms.Parameter(Tensor(np.ones((3, 2), np.float32)), name="weight")

        def construct(self, x):
            return x @ self.weight

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = Linear()

        def construct(self, x):
            return torch.add(torch.nn.functional.relu(self.fc(x)), x.sum())

    return Net()


def test_a_torch_of_mindspores_is_told_from_torch(torch, monkeypatch):
    assert adapted_torch() is torch
    monkeypatch.setattr(torch, "Tensor", type("Tensor", (), {"__module__": "torch"}))
    assert adapted_torch() is None


def test_dumps_have_torchs_prefixes_numpys_files_and_say_so(torch, model, tmp_path):
    recorder = PrecisionDebugger(dump_path=str(tmp_path), task="tensor", level="mix", model=model)
    recorder.start()
    model(Tensor(np.ones((4, 3), np.float32)))
    recorder.stop()
    recorder.step()
    folder = tmp_path / "step0" / "rank0"
    found = json.loads((folder / "dump.json").read_text())
    assert found["framework"] == "mindtorch"
    assert list(found["data"]) == [
        "Tensor.__matmul__.0.forward",
        "Module.fc.Linear.forward.0",
        "Functional.relu.0.forward",
        "Tensor.sum.0.forward",
        "Torch.add.0.forward",
    ]
    assert np.load(folder / "dump_tensor_data" / "Torch.add.0.forward.output.0.npy").shape == (4, 2)


def test_the_monitor_watches_its_modules_as_cells(model, tmp_path):
    optimizer = nn.SGD(model.trainable_params(), 0.1)
    monitor = TrainMonitor({"output_dir": str(tmp_path)}).watch(model, optimizer)
    x = Tensor(np.ones((4, 3), np.float32))
    grad = ms.value_and_grad(lambda x: model(x).mean(), None, optimizer.parameters)
    optimizer(grad(x)[1])
    monitor.close()
    assert json.loads((tmp_path / "run.json").read_text())["framework"] == "mindspore"
    assert "fc.weight" in (tmp_path / "rank0" / "gradient_0-999.csv").read_text()
