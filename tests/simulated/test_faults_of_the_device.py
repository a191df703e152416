"""What the device's own checks find stands in the same timeline as everything else."""

import logging

import on_device
import pytest
import torch
from tiny_models import mlp

import trainsentry
from trainsentry.collectors.torch.device.npu import NPU
from trainsentry.collectors.torch.device.npu_faults import SILENT_CHECK


@pytest.fixture(autouse=True)
def _listening_ends():
    NPU._faults.forget()
    yield
    NPU._faults.forget()


def test_a_finding_of_the_silent_check_is_a_number_at_its_step(out):
    model, optimizer = on_device.make("npu", mlp)

    def before_step(step):
        if step == 2:
            logging.getLogger(SILENT_CHECK).warning("[Warning] feature detection detects abnormal results!")

    with trainsentry.TrainMonitor({"output_dir": str(out), "strict": True}).watch(model, optimizer) as monitor:
        on_device.train(model, optimizer, on_device.batches(model, 5, "npu"), monitor, before_step)
        records = monitor.records()
    found = records[records.quantity == "silent_check"]
    assert [(int(row.step), float(row["max"])) for _, row in found.iterrows()] == [(2, 1.0)]


def test_a_fault_of_memory_that_a_step_has_recovered_from_is_a_number_at_its_step(out, monkeypatch):
    faulty = []
    monkeypatch.setattr(torch.npu, "_get_uce_addr", lambda: list(faulty), raising=False)
    monkeypatch.setattr(torch.npu, "restart_device", lambda device: faulty.clear(), raising=False)
    model, optimizer = on_device.make("npu", mlp)

    def before_step(step):
        if step == 3:  # as torch_npu raises in the middle of a step, which is then done again
            faulty.append({"ptr": 1, "size": 64})
            torch.npu.restart_device(0)

    with trainsentry.TrainMonitor({"output_dir": str(out), "strict": True}).watch(model, optimizer) as monitor:
        on_device.train(model, optimizer, on_device.batches(model, 5, "npu"), monitor, before_step)
        records = monitor.records()
    found = records[records.quantity == "memory_fault"]
    assert [(int(row.step), float(row["max"])) for _, row in found.iterrows()] == [(3, 1.0)]
