"""A debugger's dump on the device holds what the tensors held, and training is the same to the bit."""

import json

import pytest
import torch
from device_training import adamw, loss_of, new_model
from the_device import DEVICE, RELATIVE, synchronize

from trainsentry import PrecisionDebugger
from trainsentry.collectors.torch.saving import load_tensor

LEVELS = ["L0", "L1", "mix"]
TOLERANCE = max(RELATIVE, 1e-6)  # a dump writes float32


def new_debugger(folder, task, level):
    """Return a debugger of step 1; overflows do not end the run."""
    path = folder / "config.json"
    of_task = {"overflow_nums": -1} if task == "overflow_check" else {}
    path.write_text(json.dumps({"task": task, "level": level, "dump_path": str(folder), "step": [1], task: of_task}))
    return PrecisionDebugger(str(path))


def debugged(folder, task, level, steps=3, overflows=False):
    """Train, dumped where a folder is given; return the losses, and the directory of step 1's dump."""
    model = new_model()
    optimizer = adamw(model)
    debugger = new_debugger(folder, task, level) if folder else None
    losses = []
    for step in range(steps):
        if overflows and step == 1:
            model.blocks[1].up.register_forward_hook(lambda _module, _args, output: output * 1e38 * 1e38)
        if debugger is not None:
            debugger.start(model=model)
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if debugger is not None:
            debugger.stop()
            debugger.step()
        losses.append(loss.detach())
    synchronize()
    if debugger is not None:
        assert debugger._session.guard.failures == {}
    return [repr(loss.item()) for loss in losses], folder / "step1" / "rank0" if folder else None


@pytest.mark.parametrize("task", ["statistics", "tensor"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_dump_changes_no_bit_of_the_training(tmp_path, task, level):
    losses, directory = debugged(tmp_path, task, level)
    assert losses == debugged(None, task, level)[0]
    assert json.loads((directory / "dump.json").read_text())["data"]


def facts_in(data):
    """Yield the description of every tensor that a dump has statistics and a file of."""
    if isinstance(data, dict):
        if "data_name" in data and "Norm" in data:
            yield data
        for value in data.values():
            yield from facts_in(value)
    elif isinstance(data, list):
        for value in data:
            yield from facts_in(value)


@pytest.mark.parametrize("level", LEVELS)
def test_the_statistics_beside_a_dumped_tensor_are_those_of_its_file(tmp_path, level):
    _, directory = debugged(tmp_path, "tensor", level)
    data = json.loads((directory / "dump.json").read_text())["data"]
    checked = 0
    for facts in facts_in(data):
        tensor = load_tensor(directory / "dump_tensor_data" / facts["data_name"])
        assert tensor.device.type == "cpu"
        assert list(tensor.shape) == facts["shape"]
        if tensor.is_floating_point() and tensor.numel():
            wide = tensor.double()
            assert facts["Norm"] == pytest.approx(wide.norm().item(), rel=TOLERANCE)
            assert facts["Mean"] == pytest.approx(wide.mean().item(), abs=TOLERANCE * wide.abs().mean().item() + 1e-30)
            assert (facts["Max"], facts["Min"]) == (wide.max().item(), wide.min().item())
            checked += 1
    assert checked > 20


@pytest.mark.parametrize("level", ["L1", "mix"])
def test_an_overflow_is_written_with_the_call_that_made_it(tmp_path, level):
    _, directory = debugged(tmp_path, "overflow_check", level, overflows=True)
    data = json.loads((directory / "dump.json").read_text())["data"]
    made = [name for name, entry in data.items() if entry.get("overflow") == "made"]
    assert any(name.startswith("Tensor.__mul__.1") for name in made), made


def test_a_tensor_that_changes_after_its_call_is_dumped_as_it_was(tmp_path):
    debugger = PrecisionDebugger(task="tensor", level="L1", dump_path=str(tmp_path))
    debugger.start()
    x = torch.arange(6.0, device=DEVICE)
    y = x * 2
    y.add_(100.0)
    x.zero_()
    debugger.stop()
    debugger.step()
    folder = tmp_path / "step0" / "rank0" / "dump_tensor_data"
    assert load_tensor(folder / "Tensor.__mul__.0.forward.output.0.pt").tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert load_tensor(folder / "Tensor.__mul__.0.forward.input.0.pt").tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
