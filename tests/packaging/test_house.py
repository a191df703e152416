"""The shape of the code: folders and files that a reader takes in at once, short functions, one meaning a name."""

import ast
import importlib
import importlib.util
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = ("collectors", "anomaly", "exporters", "monitor")

MOST_FILES = 20
"""Python files that a folder shows: about fifteen are taken in at once."""

MOST_LINES = 400
"""Lines of a file: it is one thought."""

MOST_LINES_OF_A_FUNCTION = 60
"""A function fits on a screen."""


def files(*folders):
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def name_of(path):
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("top", [*CODE, "tests"])
def test_no_folder_shows_too_many_files(top):
    shown = defaultdict(int)
    for path in files(top):
        shown[name_of(path.parent)] += 1
    assert {folder: count for folder, count in shown.items() if count > MOST_FILES} == {}


@pytest.mark.parametrize("top", [*CODE, "tests"])
def test_no_file_and_no_function_is_too_long(top):
    too_long = {}
    for path in files(top):
        text = path.read_text()
        if (lines := len(text.splitlines())) > MOST_LINES:
            too_long[name_of(path)] = lines
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = node.end_lineno - node.lineno + 1
                if lines > MOST_LINES_OF_A_FUNCTION:
                    too_long[f"{name_of(path)}: {node.name}"] = lines
    assert too_long == {}


SEAM = {"collectors/backend.py", "collectors/capture.py"}
"""The files of protocols that the frameworks implement."""


def framework(path):
    """Return the framework that a file is written for, or None."""
    if "mindspore" in path:
        return "mindspore"
    return "torch" if path.startswith(("collectors/torch/", "monitor/demo/")) else None


def is_one_meaning(paths):
    """Return whether these are a protocol of the frameworks' seam and what implements it, one file a framework."""
    implementations = [framework(path) for path in paths if path not in SEAM]
    return None not in implementations and len(set(implementations)) == len(implementations)


def test_no_two_public_classes_share_a_name_but_those_that_do_the_same_for_two_frameworks():
    """`StepRows` of torch and `StepRows` of MindSpore implement `StepRows` of the seam, as do the demo's models."""
    where = defaultdict(list)
    for path in files(*CODE):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(name_of(path))
    shared = {name: paths for name, paths in where.items() if len(paths) > 1}
    meanings = {name: paths for name, paths in shared.items() if not is_one_meaning(paths)}
    assert meanings == {}


def imported_names(path):
    """Return the modules of ours that a script imports from, each with the names; MindSpore has its own environment."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trainsentry"):
            found += [
                (node.module, alias.name) for alias in node.names if "mindspore" not in f"{node.module}.{alias.name}"
            ]
    return found


@pytest.mark.parametrize("top", ["benchmarks", "examples"])
def test_what_scripts_import_of_the_package_is_there(top):
    """No test runs them all, and code moves."""
    missing = [
        f"{name_of(path)}: {module}.{name}"
        for path in files(top)
        for module, name in imported_names(path)
        if importlib.util.find_spec(module) is None
        or not (
            hasattr(importlib.import_module(module), name) or importlib.util.find_spec(f"{module}.{name}") is not None
        )
    ]
    assert missing == []
