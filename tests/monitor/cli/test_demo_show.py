"""What the demo prints fits a terminal of any width: the culprit can be told, and notes keep their indent."""

import pytest
from rich.console import Console

from trainsentry.anomaly.incident import Incident, Suspect
from trainsentry.monitor.cli.demo import show

NAME = "encoder.blocks.11.down.weight"


def incident():
    found = Suspect(75, 0, NAME, "activation_grad_output", "norm", "underflow", 9.0, "", "its evidence")
    text = f"At step 75 {NAME} broke."
    return Incident(
        1, 75, 0, NAME, "parameter", "norm", "overflow", "critical", 9.0, text, (found,) * 5, ("stop",), 75, 75
    )


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_culprit_can_be_told_from_the_box(width, monkeypatch):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 - it records
    monkeypatch.setattr(show, "out", console)
    console.print(show.panel(incident()))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    assert sum(".11.down.weight" in line and "75" in line for line in lines) >= 4  # its end, that tells it apart
    assert any("kind" in line for line in lines) == (width >= 80)


def test_a_note_that_is_broken_goes_on_behind_its_name(tmp_path, monkeypatch):
    (tmp_path / "report.html").touch()
    monkeypatch.setattr(show.out, "_width", 50)
    monkeypatch.setattr(show.out, "_force_terminal", True)
    with show.out.capture() as captured:
        show.show_files(tmp_path)
    lines = captured.get().splitlines()
    at = next(i for i, line in enumerate(lines) if "report.html" in line)
    assert lines[at + 1].startswith(" " * 19)
    assert lines[at + 1].strip()
