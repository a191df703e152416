"""The debugger's dumps of a device's tensors hold their values, and dumping changes no bit of the training."""

import json

import on_device
import pytest
import torch
from tiny_models import mlp
from torch.nn import functional as F

from trainsentry import PrecisionDebugger
from trainsentry.collectors.torch.saving import load_tensor

STEPS = 2


def trained(debugger=None):
    """Train with or without a debugger; return losses, weights, and the inputs of the first step."""
    model, optimizer = on_device.make("npu", mlp)
    data = on_device.batches(model, STEPS, "npu")
    losses = []
    for inputs, targets in data:
        if debugger is not None:
            debugger.start(model)
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        if debugger is not None:
            debugger.stop()
            debugger.step()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [x.item() for x in losses], on_device.state(model), data[0][0].cpu()


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
@pytest.mark.parametrize("task", ["statistics", "tensor", "structure", "overflow_check"])
def test_training_is_equal_to_the_bit_and_values_are_those_of_the_device(tmp_path, task, level):
    bare = trained()
    debugger = PrecisionDebugger(task=task, level=level, dump_path=str(tmp_path))
    dumped = trained(debugger)
    assert debugger._session.guard.failures == {}
    debugger.close()
    assert dumped[0] == bare[0]
    assert all(torch.equal(dumped[1][name], value) for name, value in bare[1].items())
    if task in {"statistics", "tensor"}:
        assert_described(tmp_path / "step0" / "rank0", level, bare[2], tensors=task == "tensor")


def assert_described(folder, level, inputs, *, tensors):
    data = json.loads((folder / "dump.json").read_text())["data"]
    call = "Functional.linear.0.forward" if level == "L1" else "Module.0.Linear.forward.0"
    facts = data[call]["input_args"][0]
    assert facts["Max"] == pytest.approx(inputs.max().item())
    assert facts["Min"] == pytest.approx(inputs.min().item())
    assert facts["Mean"] == pytest.approx(inputs.double().mean().item(), abs=1e-6)
    assert facts["Norm"] == pytest.approx(inputs.double().norm().item(), rel=1e-5)
    if tensors:
        assert torch.equal(load_tensor(folder / "dump_tensor_data" / facts["data_name"]), inputs)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_kernels_of_one_call_are_dumped_without_a_change_of_the_training(tmp_path, direction):
    bare = trained()
    torch.npu.dumps.clear()
    path = tmp_path / "config.json"
    config = {"task": "tensor", "level": "L2", "dump_path": str(tmp_path)}
    path.write_text(json.dumps({**config, "tensor": {"list": [f"Functional.linear.0.{direction}"]}}))
    debugger = PrecisionDebugger(str(path))
    dumped = trained(debugger)
    assert debugger._session.guard.failures == {}
    debugger.close()
    expected = [[str(tmp_path / f"step{i}" / "kernel_config_0.json"), None] for i in range(STEPS)]
    assert torch.npu.dumps == expected[0] + expected[1]
    assert dumped[0] == bare[0]
    assert all(torch.equal(dumped[1][name], value) for name, value in bare[1].items())


def test_what_a_device_computed_is_checked_on_the_cpu(tmp_path):
    bare = trained()
    debugger = PrecisionDebugger(task="run_ut", dump_path=str(tmp_path), step=[0])
    checked = trained(debugger)
    assert debugger._session.guard.failures == {}
    debugger.close()
    assert checked[0] == bare[0]
    assert all(torch.equal(checked[1][name], value) for name, value in bare[1].items())
    [table] = (tmp_path / "step0" / "rank0").glob("accuracy_checking_result_*.csv")
    rows = [line.split(",") for line in table.read_text(encoding="utf-8-sig").splitlines()[1:]]
    assert [row for row in rows if row[1:3] != ["pass", "pass"]] == []
    assert {row[0].rpartition(".")[0] for row in rows} >= {"Functional.linear", "Functional.cross_entropy"}
