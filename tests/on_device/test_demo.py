"""The demo trains on the device and finds the weight that broke."""

from the_device import DEVICE
from typer.testing import CliRunner

from trainsentry.monitor.cli.app import app

CHOICES = ("cpu", "cuda", "npu")


def test_the_first_suspect_is_the_flipped_parameter(tmp_path):
    device = DEVICE.type if DEVICE.type in CHOICES else "auto"
    args = ["demo", "--device", device, "--steps", "60", "--seed", "4", "--output-dir", str(tmp_path / "demo")]
    result = CliRunner().invoke(app, args)
    text = " ".join(result.output.split())
    assert result.exit_code == 0, text
    assert "The first suspect is the flipped parameter." in text
    assert DEVICE.type == "cpu" or f"on {DEVICE.type}" in text


def test_a_clean_run_reports_nothing(tmp_path):
    args = ["demo", "--device", "auto", "--steps", "40", "--fault", "none", "--output-dir", str(tmp_path / "demo")]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    assert "the monitor reported nothing" in " ".join(result.output.split())
