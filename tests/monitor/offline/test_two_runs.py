"""Two runs beside each other: the weight comes before the loss it changed, sentence and exit status say the same."""

import asyncio
import csv
import math

import pytest
from browser import needs_chromium, opened
from recorded_runs import make_run
from step_records import Records
from typer.testing import CliRunner
from written_files import fail

from trainsentry.collectors.statistics import STATISTICS
from trainsentry.exporters.csv.writer import CsvWriter
from trainsentry.exporters.engine import map_locally
from trainsentry.exporters.files.json_files import replace_json
from trainsentry.monitor.cli.app import app
from trainsentry.monitor.offline.two_runs import compare_runs, relative

FAULT = 23
BROKEN = "layers.3.weight"
RUNNER = CliRunner(env={"COLUMNS": "200"})


def write_run(root, *, fault=None, steps=60, layers=8, loss="loss", scale=1.0):
    """Write a run whose weights are read every tenth step; from `fault` on one weight is 1,024 times what it was.

    Afterwards everything differs a little, as updates by other gradients make it.
    """
    records = Records()
    writer = CsvWriter(root / "rank0", records.table, STATISTICS)
    for n in range(steps):
        off = 1.01 if fault is not None and n >= fault else 1.0
        sizes = {(f"layers.{i}.weight", "gradient"): (1.0 + i) * off * scale for i in range(layers)}
        if n % 10 == 0:
            sizes |= {(f"layers.{i}.weight", "parameter"): (2.0 + i) * (off**0.1) for i in range(layers)}
            if fault is not None and n >= fault:
                sizes[BROKEN, "parameter"] = 5.0 * 1024
        writer.write(records.step(n, sizes | {(loss, loss): (3.0 - n / 100) * off}))
    writer.close()
    replace_json(root / "rank0" / "status.json", {"state": "closed", "rank": 0, "step": steps - 1})
    replace_json(root / "run.json", {"configuration": {"output_dir": root.name, "eps": 0.0}})
    return root


def compared(a, b, **names):
    return compare_runs(a, b, names, map_locally, fail)


def test_the_weight_that_was_read_later_comes_before_the_loss_it_changed(tmp_path):
    found = compared(write_run(tmp_path / "a"), write_run(tmp_path / "b", fault=FAULT))
    first = found.series[0]
    assert (first.name, first.table, first.first, first.equal_until) == (BROKEN, "parameter", 30, 20)
    assert first.relative == pytest.approx(1023)
    assert (found.series[1].name, found.series[1].first) == ("loss", FAULT)
    assert {s.table for s in found.series[2:10]} == {"gradient"}
    assert "equal at step 20, not read in between; loss differs from step 23" in found.sentence
    assert found.sentence.startswith(f"they first differ at step 30, rank0: norm of parameter {BROKEN} is 5 and 5120")


def test_weights_that_all_change_alike_are_an_effect_and_stay_behind(tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", fault=FAULT)
    for path in (b / "rank0").glob("parameter*.csv"):
        path.write_text(path.read_text().replace("5120.0", "5.005").replace("2560.0", "2.5025"))
    found = compared(a, b)
    assert (found.series[0].name, found.series[0].first) == ("loss", FAULT)
    assert found.series[-1].table == "parameter"


def test_at_one_step_the_weights_stand_before_the_loss_and_it_before_the_gradients(tmp_path):
    found = compared(write_run(tmp_path / "a"), write_run(tmp_path / "b", fault=20))
    tables = list(dict.fromkeys(row[2] for row in found.rows))
    assert (tables, found.rows[0][0]) == (["parameter", "scalars", "gradient"], 20)
    assert found.series[0].name == BROKEN


def test_the_size_of_a_difference_does_not_end_at_one():
    assert relative(1.0, 1024.0) == relative(1024.0, 1.0) == 1023
    assert relative(1e-3, 1e6) == pytest.approx(1e9)
    assert relative(math.nan, math.nan) == 0
    assert relative(1.0, math.nan) == relative(0.0, 1.0) == math.inf


@pytest.mark.parametrize(
    ("other", "status", "words"),
    [
        ({}, 0, "they do not differ: 17 series up to step 59"),
        ({"fault": FAULT}, 1, "they first differ at step 30"),
        ({"steps": 50}, 1, "they do not differ in what both have (17 series), but 98 rows are in only one of the two"),
        ({"steps": 0}, 2, "holds no"),
    ],
)
def test_exit_status_and_sentence_agree(tmp_path, other, status, words):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", **other)
    result = RUNNER.invoke(app, ["compare", str(a), str(b), "-o", str(tmp_path / "c.csv")])
    assert (result.exit_code, words in result.output) == (status, True), result.output


def test_runs_with_nothing_in_common_say_so_and_write_nothing(tmp_path):
    a, b = write_run(tmp_path / "a"), make_run(tmp_path / "b", ranks=1, incident=False)
    for path in [*(a / "rank0").glob("scalars*"), *(b / "rank0").glob("scalars*")]:
        path.unlink()
    out, page = tmp_path / "c.csv", tmp_path / "c.html"
    result = RUNNER.invoke(app, ["compare", str(a), str(b), "-o", str(out), "--html", str(page)])
    assert result.exit_code == 2
    assert "have nothing in common: no series has a step in both" in result.output
    assert not out.exists()
    assert not page.exists()


def test_the_rows_shown_are_a_table_of_first_differences_and_the_file_has_all(tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", fault=FAULT)
    result = RUNNER.invoke(app, ["compare", str(a), str(b), "-o", str(tmp_path / "c.csv")])
    lines = result.output.splitlines()
    head = next(i for i, line in enumerate(lines) if line.split()[:2] == ["step", "rank"])
    assert lines[head + 1].split()[:4] == ["30", "rank0", "parameter", BROKEN]
    column = lines[head].index("statistic")
    assert {line[column - 2 : column] for line in lines[head + 1 : head + 10]} == {"  "}
    with (tmp_path / "c.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) > 300
    assert [int(r["step"]) for r in rows] == sorted(int(r["step"]) for r in rows)


def test_the_page_names_the_weight_first_escapes_names_and_asks_for_nothing(tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", fault=FAULT)
    hostile = "<img src=x onerror=alert(1)>"
    for root in (a, b):
        for path in (root / "rank0").glob("*.csv"):
            path.write_text(path.read_text().replace("layers.5.weight", hostile))
    page = tmp_path / "out.html"
    result = RUNNER.invoke(app, ["compare", str(a), str(b), "-o", str(tmp_path / "c.csv"), "--html", str(page)])
    assert (result.exit_code, "out.html" in result.output) == (1, True)
    text = page.read_text()
    body = text[text.index("<body>") :]
    assert body.index(f"First difference: {BROKEN}") < body.index("in order of cause") < body.index(">loss<")
    assert hostile not in text
    assert "default-src 'none'" in text
    assert "<td>output_dir</td><td>a</td><td>b</td>" in body
    assert page.stat().st_size < 5 * 2**20


@needs_chromium
@pytest.mark.parametrize(("width", "dark"), [(1400, False), (400, True)])
def test_a_browser_draws_both_runs_with_the_first_difference_on_the_first_screen(tmp_path, width, dark):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", fault=FAULT)
    page = tmp_path / "out.html"
    RUNNER.invoke(app, ["compare", str(a), str(b), "-o", str(tmp_path / "c.csv"), "--html", str(page)])

    async def looking():
        async with opened(page.as_uri(), width=width, dark=dark) as shown:
            await shown.wait_for("document.querySelectorAll('.bk-Column, .bk-Figure').length >= 4")
            bottom = await shown.ask("document.querySelector('.first').getBoundingClientRect().bottom")
            assert 0 < bottom < 900
            assert BROKEN in await shown.ask("document.querySelector('.first').textContent")
            assert await shown.ask("Bokeh.documents[0].roots().length") >= 4
            assert await shown.ask("document.documentElement.scrollWidth <= window.innerWidth")
            assert shown.problems == []
            assert {url.partition(":")[0] for url in shown.requests} <= {"file", "data", "blob"}

    asyncio.run(looking())
