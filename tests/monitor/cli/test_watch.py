"""The live view reads files alone, says what matters, and ends with the run."""

import json

from recorded_runs import CULPRIT, make_run
from typer.testing import CliRunner

from trainsentry.exporters.run_reader import last_scalars, read_run, tail
from trainsentry.monitor.cli.app import app

runner = CliRunner(env={"COLUMNS": "140"})


def test_a_run_that_is_over_is_shown_with_its_incident(tmp_path):
    make_run(tmp_path)
    result = runner.invoke(app, ["watch", str(tmp_path)])
    assert result.exit_code == 1
    for text in (CULPRIT, "incident 1", "step 39", "2 ranks", "closed", "loss", "worst series"):
        assert text in result.output


def test_a_run_that_is_well_says_so(tmp_path):
    make_run(tmp_path, incident=False)
    result = runner.invoke(app, ["watch", str(tmp_path), "--once"])
    assert (result.exit_code, "No incident." in result.output) == (0, True)


def test_a_silent_rank_and_trouble_of_the_monitor_are_seen(tmp_path):
    make_run(tmp_path, incident=False)
    path = tmp_path / "rank1" / "status.json"
    status = json.loads(path.read_text()) | {
        "state": "running",
        "updated": 0,
        "gaps": [{"sink": "csv", "first_step": 3, "last_step": 9, "reason": "full"}],
    }
    path.write_text(json.dumps(status))
    output = runner.invoke(app, ["watch", str(tmp_path), "--once"]).output
    assert "csv" in output
    assert " h " in output  # not seen for hours


def test_markup_in_names_is_shown_as_it_is(tmp_path):
    make_run(tmp_path, name="[red]layer[/red]")
    assert "[red]layer[/red]" in runner.invoke(app, ["watch", str(tmp_path), "--once"]).output


def test_what_is_no_run_is_bad_input(tmp_path):
    assert runner.invoke(app, ["watch", str(tmp_path)]).exit_code == 2
    assert runner.invoke(app, ["watch", str(tmp_path / "missing")]).exit_code == 2


def test_a_line_that_is_being_written_is_left_out(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    assert tail(path) == ['{"a": 1}', '{"a": 2}']
    assert tail(path, 14) == ['{"a": 2}']
    assert tail(tmp_path / "none") == []


def test_scalars_after_a_restart_are_the_newest(tmp_path):
    (tmp_path / "scalars_0-999.csv").write_text("name,step,micro_step,value\nloss,4,0,1.0\nloss,5,0,1.0\nloss,6,0,1.\n")
    (tmp_path / "scalars_5-999.r1.csv").write_text("name,step,micro_step,value\nloss,5,0,2.0\n")
    assert last_scalars(tmp_path)["loss"] == [(4, 1.0), (5, 2.0), (6, 1.0)]
    assert read_run(tmp_path).ranks == {}
