"""The page of a check names the worst call first, holds every call, and lets nothing out of its place."""

import asyncio

import pytest
import torch
import torch.nn.functional as F
from browser import needs_chromium, opened
from checked import check, dumped, write_dump
from debugged import Tower
from typer.testing import CliRunner

from trainsentry.exporters.dumps.accuracy_csv import DETAIL_COLUMNS
from trainsentry.monitor.accuracy.check_page import COLUMNS, write_page
from trainsentry.monitor.accuracy.check_run import CheckOptions
from trainsentry.monitor.cli.app import app

GELU = F.gelu


def page_of(tmp_path, summary):
    write_page(tmp_path / "page.html", summary, CheckOptions(tmp_path, tmp_path))
    return tmp_path / "page.html"


def test_every_column_of_the_table_has_a_name_on_the_page():
    assert len(COLUMNS) == len(DETAIL_COLUMNS)


def test_a_worse_operation_is_the_headline_with_its_numbers(tmp_path, monkeypatch):
    dump = dumped(tmp_path, Tower)

    def worse(x, *arguments, **named):
        in_half = x.bfloat16() if x.dtype is torch.float32 else x
        return GELU(in_half, *arguments, **named).to(x.dtype)

    monkeypatch.setattr(F, "gelu", worse)
    summary = check(dump, tmp_path / "out")
    page = page_of(tmp_path, summary).read_text()
    assert f"<h1>{summary.failures[0].call} is furthest from its limit.</h1>" in page
    assert "largest absolute error" in page
    assert all(f"<td>{call.call}</td>" in page for call in summary.calls)


def test_a_clean_check_says_so_and_a_hostile_name_stays_text(tmp_path):
    page = page_of(tmp_path, check(dumped(tmp_path), tmp_path / "out")).read_text()
    assert "Every call that can be compared passed." in page
    hostile = "Functional.<script>alert(1)</script>.0.forward"
    write_dump(tmp_path / "bad", {hostile: {"input_args": [], "input_kwargs": {}, "output": []}})
    page = page_of(tmp_path, check(tmp_path / "bad", tmp_path / "again")).read_text()
    assert "<script>alert" not in page


def test_the_command_writes_it_and_says_where_and_why_not(tmp_path):
    dump = dumped(tmp_path)
    command = ["check", str(dump), "--processes", "0", "--only", "linear", "-o"]
    ran = CliRunner().invoke(app, [*command, str(tmp_path / "out"), "--html", str(tmp_path / "page.html")])
    assert ran.exit_code == 0, ran.output
    assert (tmp_path / "page.html").exists()
    assert "page: " in ran.output
    ran = CliRunner().invoke(app, [*command, str(tmp_path / "again"), "--html", str(tmp_path / "no" / "page.html")])
    assert ran.exit_code == 2
    assert "--html" in ran.output


@needs_chromium
def test_a_search_leaves_the_calls_that_match(tmp_path):
    summary = check(dumped(tmp_path), tmp_path / "out")
    wanted = sum("linear" in call.call for call in summary.calls)

    async def look():
        async with opened(page_of(tmp_path, summary).as_uri()) as page:
            await page.wait_for("!!document.getElementById('find')")
            await page.ask("find.value = 'Linear'; find.dispatchEvent(new Event('input')), 0")
            shown = "[...document.querySelectorAll('#calls tbody tr')].filter(e => e.checkVisibility()).length"
            assert page.problems == []
            return await page.ask(shown), await page.ask("matches.textContent")

    assert 0 < wanted < len(summary.calls)
    assert asyncio.run(look()) == (wanted, f"{wanted} found")


@needs_chromium
@pytest.mark.parametrize(("width", "dark"), [(1400, False), (400, True)])
def test_a_person_sees_first_whether_the_check_passed(tmp_path, width, dark):
    page = page_of(tmp_path, check(dumped(tmp_path), tmp_path / "out"))

    async def look():
        async with opened(page.as_uri(), width=width, dark=dark) as shown:
            await shown.wait_for("document.querySelectorAll('#calls tbody tr').length > 0")
            box = "document.querySelector('h1').getBoundingClientRect()"
            assert 0 < await shown.ask(f"{box}.bottom") < 500
            assert (
                await shown.ask("document.querySelector('h1').textContent") == "Every call that can be compared passed."
            )
            assert await shown.ask("document.documentElement.scrollWidth <= window.innerWidth")
            inks = await shown.ask(
                "[getComputedStyle(document.querySelector('h1')).color, "
                "getComputedStyle(document.body).backgroundColor]"
                ".map((c) => c.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + Number(b), 0) / 3)"
            )
            assert (inks[0] > 200 > 60 > inks[1]) if dark else (inks[0] < 60 < 200 < inks[1])
            assert shown.problems == []
            assert {url.partition(":")[0] for url in shown.requests} <= {"file", "data"}

    asyncio.run(look())
