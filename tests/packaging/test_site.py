"""The site of the documentation builds without a warning, holds every page and name, and needs no other host."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import trainsentry

ROOT = Path(__file__).parents[2]
SOURCE = re.compile(r"<(?:script|img|link|iframe)\b[^>]*?\b(?:src|href)=[\"'](?:https?:)?//", re.IGNORECASE)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site; a broken link or anchor, or a page in no menu, ends the build."""
    out = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", out], cwd=ROOT, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    return out


def test_every_page_is_there(site):
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")} | {"api", "CHANGELOG", "CONTRIBUTING"}
    assert pages <= {page.stem for page in site.glob("*.html")}
    assert (site / "benchmarks" / "RESULTS.html").exists()


@pytest.mark.parametrize("name", [name for name in trainsentry.__all__ if not name.startswith("_")])
def test_the_reference_shows_each_public_name(site, name):
    assert f'id="trainsentry.{name}"' in (site / "api.html").read_text()


def test_no_page_loads_anything_from_another_host(site):
    assert [page.name for page in site.rglob("*.html") if SOURCE.search(page.read_text())] == []


def test_the_search_finds_a_key_of_the_configuration(site):
    assert "overflow_nums" in (site / "search" / "search_index.json").read_text()


def test_the_training_of_the_tutorial_stops_with_the_sentence_that_it_shows(tmp_path):
    page = (ROOT / "docs" / "tutorial.md").read_text()
    [script] = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "mine.py").write_text(script)
    ran = subprocess.run([sys.executable, "mine.py"], cwd=tmp_path, capture_output=True, text=True)
    found = "on rank 0: the gradient of 2.weight holds 1 NaN value at step 120; it was last healthy at step "
    assert f"Since step 120 {found}119." in page
    assert ran.returncode == 1
    assert "TrainingStopped" in ran.stderr
    # A busy machine's recorder may miss steps of a millisecond: the last healthy one is then an earlier one.
    assert re.search(rf"(?:Since|Between step \d+ and) step 120 {found}\d+\.", ran.stderr), ran.stderr
