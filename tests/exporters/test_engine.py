"""This machine and a dask cluster of two workers give the same answer."""

import pytest
from recorded_runs import CULPRIT, make_run
from step_records import Records
from typer.testing import CliRunner
from written_files import fail

from trainsentry.collectors.statistics import STATISTICS
from trainsentry.exporters.csv.writer import CsvWriter
from trainsentry.exporters.engine import engine
from trainsentry.exporters.report.page import write_report
from trainsentry.monitor.cli.app import app
from trainsentry.monitor.offline.compare_runs import compare
from trainsentry.monitor.offline.history import diagnose


def write(root, jump):
    for rank in range(3):
        records = Records(rank=rank)
        writer = CsvWriter(root / f"rank{rank}", records.table, STATISTICS)
        for n in range(40):
            size = float("nan") if n == jump and rank == 1 else 1.0
            writer.write(records.step(n, {("fc.weight", "gradient"): size, ("loss", "loss"): 1.0}))
        writer.close()
        (root / f"rank{rank}" / "status.json").write_text('{"state": "closed"}')


@pytest.fixture(scope="module")
def mapper():
    pytest.importorskip("distributed")
    with engine("dask") as made:
        yield made


def test_diagnosis_comparison_and_report_say_the_same(tmp_path, mapper):
    a, b = tmp_path / "a", tmp_path / "b"
    write(a, 30)
    write(b, 25)
    ranks = [a / f"rank{r}" for r in range(3)]
    local, far = diagnose(ranks, fail), diagnose(ranks, fail, mapper=mapper)
    assert [i.to_json() for i in local] == [i.to_json() for i in far]
    assert (local[0].rank, local[0].name) == (1, "fc.weight")
    assert str(compare(a, b)) == str(compare(a, b, mapper=mapper))
    run = make_run(tmp_path / "run")
    pages = [write_report(run, tmp_path / name, fail, mapper=e).read_text() for name, e in (("x", mapper),)]
    assert CULPRIT in pages[0]


def test_an_engine_that_there_is_not_is_named(tmp_path):
    write(tmp_path, 30)
    result = CliRunner().invoke(app, ["diagnose", str(tmp_path), "--engine", "spark"])
    assert result.exit_code == 2
