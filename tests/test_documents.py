"""What the documents name exists, their configurations are valid, and their examples run."""

import json
import re
import subprocess
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

import trainsentry
from trainsentry.monitor.config.files import load_config

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), ROOT / "benchmarks/RESULTS.md"]
)
OF_THE_USER = {"my_rules.py", "my_rules", "mine.py"}
"""Files and modules that a reader is to write."""

ROOMS = "collectors|anomaly|exporters|monitor|benchmarks|tests"


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@cache
def files():
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in names if (ROOT / name).exists()]


def is_there(name, page):
    """Whether a path from the top or from the page's folder, or a bare file name, is in the tree; `*` matches names."""
    pattern = re.compile(re.escape(name.lstrip("/")).replace(r"\*", "[^/]*"))
    beside = page.parent.relative_to(ROOT).as_posix()
    for known in files():
        ends = known.rpartition("/")[2] if "/" not in name else known
        if pattern.fullmatch(ends) or pattern.fullmatch(known) or pattern.fullmatch(known.removeprefix(f"{beside}/")):
            return True
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_section_of_a_page_is_there_twice(page):
    headings = re.findall(r"^##+ .*$", page.read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(set(headings))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_file_and_folder_that_a_page_names_is_in_the_tree(page):
    named = set(re.findall(r"(?<![\w<])([\w/.*-]*[\w*]\.py)\b", page.read_text())) - OF_THE_USER
    missing = sorted(name for name in named if not is_there(name.removeprefix("../"), page))
    folders = re.findall(rf"(?<![\w/])(?:{ROOMS})/[\w/]*/", page.read_text())
    missing += [folder for folder in folders if not (ROOT / folder).is_dir()]
    assert not missing, f"{page.name} names files that are not there: {missing}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_module_and_name_that_a_page_names_can_be_found(page):
    named = set(re.findall(r"(?<!\")\btrainsentry(?:\.\w+)+", page.read_text()))
    missing = []
    for name in named:
        parts = name.split(".")[1:]
        if parts[0] in trainsentry.__all__:
            continue
        path = (ROOT / "trainsentry").joinpath(*parts)
        is_module = path.is_dir() or path.with_suffix(".py").exists()
        if not (is_module or defines(path.parent.with_suffix(".py"), parts[-1])):
            missing.append(name)
    assert not missing, f"{page.name} names modules that are not there: {missing}"


def defines(module, name):
    return module.exists() and re.search(rf"^(?:class|def) {name}\b|^{name}\b.*=", module.read_text(), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_test_that_a_page_names_exists(page):
    names = set(re.findall(r"\b(test_\w+)(…?)(?!\w|\.py|\*)", page.read_text()))
    tests = "\n".join(
        (ROOT / name).read_text() for name in files() if name.startswith("tests/") and name.endswith(".py")
    )
    missing = [name + dots for name, dots in names if not re.search(rf"def {name}{'' if dots else '[(]'}", tests)]
    assert not missing, f"{page.name} names tests that are not there: {missing}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_between_pages_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        other = page.parent / path if path else page
        assert other.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(other), f"{page.name}: {target}: no such heading"


def anchors(page):
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_configuration_on_a_page_is_allowed(page):
    for block in blocks(page, "json"):
        decoder, rest = json.JSONDecoder(), block.strip()
        while rest:
            found, end = decoder.raw_decode(rest)
            rest = rest[end:].lstrip()
            if set(found) & set(trainsentry.MonitorConfig.model_fields) and "task" not in found:
                load_config(found)


RECIPES = blocks(ROOT / "docs" / "recipes.md", "python")


@pytest.mark.skipif(find_spec("torch") is None, reason="the recipes are written for torch")
@pytest.mark.parametrize(
    "recipe", [r for r in RECIPES[1:] if not r.startswith("# ")], ids=lambda r: r.split("\n")[0][:40]
)
def test_every_recipe_runs_as_it_stands(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for module in (r for r in RECIPES if r.startswith("# ")):
        (tmp_path / module.partition("\n")[0].removeprefix("# ")).write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    names = {"__name__": "recipe"}
    exec(RECIPES[0], names)
    exec(recipe, names)


TROUBLES = blocks(ROOT / "docs" / "troubleshooting.md", "python")


@pytest.mark.skipif(find_spec("torch") is None, reason="the examples are written for torch")
@pytest.mark.parametrize("number", range(1, len(TROUBLES)))
def test_every_example_of_what_to_do_in_trouble_runs_as_it_stands(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "trouble"}
    exec(TROUBLES[0], names)
    exec(TROUBLES[number], names)


def test_every_command_that_helps_in_trouble_has_the_options_that_are_named(monkeypatch):
    from typer.testing import CliRunner

    from trainsentry.monitor.cli.app import app

    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    named = set(re.findall(r"trainsentry (\w+) (?:[\w.=]+ )*(--[a-z-]+)", page))
    assert {command for command, _ in named} >= {"watch", "diagnose", "report"}
    for command, option in named:
        words = [command, "--help"] if command != "ctl" else ["ctl", "set", "--help"]
        shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, words).output
        assert option in shown, (command, option)


def test_every_key_that_helps_in_trouble_is_a_key_of_the_configuration():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    reference = (ROOT / "docs" / "configuration.md").read_text()
    for key in re.findall(r"`((?:export|collect|detect|on_incident)(?:\.\w+)+)(?:`|=)", page):
        block, _, name = key.rpartition(".")
        section = re.search(rf"^## {re.escape(block)}$(.*?)(?=^## |\Z)", reference, re.DOTALL | re.MULTILINE)
        assert section is not None, key
        assert f"| `{name}`" in section[1], key
