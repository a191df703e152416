"""What the device's own checks find stands in the same timeline as everything else."""

import logging

import on_device
from tiny_models import mlp

import trainsentry
from trainsentry.collectors.torch.device.npu_faults import SILENT_CHECK


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
