"""The demo trains on the device and finds the weight that broke."""

import pytest
import torch
from the_device import DEVICE
from typer.testing import CliRunner

from trainsentry.monitor.cli.app import app

CHOICES = ("cpu", "cuda", "npu")
DEVICES_FOR_RANKS = DEVICE.type in {"cuda", "npu"} and torch.accelerator.device_count() > 1


def test_the_first_suspect_is_the_flipped_parameter(tmp_path):
    device = DEVICE.type if DEVICE.type in CHOICES else "auto"
    args = ["demo", "--device", device, "--steps", "60", "--seed", "4", "--output-dir", str(tmp_path / "demo")]
    result = CliRunner().invoke(app, args)
    text = " ".join(result.output.split())
    assert result.exit_code == 0, text
    assert "The first suspect is the flipped parameter." in text
    assert DEVICE.type == "cpu" or f"on {DEVICE.type}" in text


@pytest.mark.skipif(not DEVICES_FOR_RANKS, reason="needs two devices")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_on_two_ranks_each_takes_a_device_of_its_own(tmp_path, strategy):
    args = ["--device", DEVICE.type, "--ranks", "2", "--strategy", strategy, "--steps", "30", "--seed", "1"]
    result = CliRunner().invoke(app, ["demo", *args, "--output-dir", str(tmp_path / "demo")])
    text = " ".join(result.output.split())
    assert result.exit_code == 0, text
    assert "The first suspect is this parameter on this rank." in text


def test_a_clean_run_reports_nothing(tmp_path):
    args = ["demo", "--device", "auto", "--steps", "40", "--fault", "none", "--output-dir", str(tmp_path / "demo")]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    assert "the monitor reported nothing" in " ".join(result.output.split())
