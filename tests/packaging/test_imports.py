"""Imports point downwards, have no cycle among the rooms, and name a framework in its own rooms alone."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

MAY_IMPORT = {
    "collectors": {"collectors"},
    "anomaly": {"anomaly", "collectors"},
    "exporters": {"exporters", "collectors"},
    "monitor": {"monitor", "anomaly", "exporters", "collectors"},
}

FRAMEWORKS_ALLOWED = (
    "collectors/torch/",
    "collectors/mindspore/",
    "monitor/demo/",
    "monitor/doctor/mindspore_",
    "monitor/doctor/torch_",
    "monitor/integrations/",
    "monitor/cli/demo",
    "monitor/mindspore_callbacks.py",
)


def modules(root):
    """Return the file of each module by its name, both from the root: `collectors.torch.watch`."""
    found = {}
    for folder in MAY_IMPORT:
        for path in sorted((root / folder).rglob("*.py")):
            place = path.relative_to(root)
            found[".".join(place.with_suffix("").parts).removesuffix(".__init__")] = place
    return found


def imported(path):
    """Yield the full names that a file imports anywhere: in functions and for type checkers too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def imports_of(root, place, known):
    """Return the modules of this project that a file imports."""
    found = set()
    for name in imported(root / place):
        package, _, inner = name.partition(".")
        if package == "trainsentry":
            found |= {m for m in (inner, inner.rpartition(".")[0]) if m in known}
    return {m for m in found if known[m].name != "__init__.py"}


def room(root, place):
    """Return the sub-folder of a file; a file that stands beside sub-folders is a room of its own."""
    stands_beside_folders = any((root / place.parent).glob("*/*.py"))
    return (place.with_suffix("") if stands_beside_folders else place.parent).as_posix()


def room_graph(root):
    """Return the rooms that each room imports."""
    known = modules(root)
    graph = {}
    for place in known.values():
        if place.name != "__init__.py":
            here = room(root, place)
            others = {room(root, known[m]) for m in imports_of(root, place, known)}
            graph.setdefault(here, set()).update(others - {here})
    return graph


def test_imports_between_the_rooms_point_downwards_and_frameworks_stay_in_their_rooms():
    for place in modules(ROOT).values():
        for name in imported(ROOT / place):
            package, _, inner = name.partition(".")
            if package == "trainsentry" and (folder := inner.partition(".")[0]) in MAY_IMPORT:
                assert folder in MAY_IMPORT[place.parts[0]], f"{place} imports {name}"
            if package in {"torch", "mindspore"}:
                assert place.as_posix().startswith(FRAMEWORKS_ALLOWED), f"{place} imports {name}"


def test_imports_among_sub_folders_have_no_cycle():
    try:
        TopologicalSorter(room_graph(ROOT)).prepare()
    except CycleError as error:
        pytest.fail(f"imports in a circle, each is imported by the next: {' → '.join(error.args[1])}")


@pytest.mark.parametrize(
    ("text", "in_a_circle"),
    [
        ("from trainsentry.collectors import watch", True),
        ("import trainsentry.collectors.watch", True),
        ("def f():\n    from trainsentry.collectors.watch import watch", True),
        ("if TYPE_CHECKING:\n    from trainsentry.collectors.watch import watch", True),
        ("from trainsentry.collectors.rows.other import watch", False),
        ("import watch", False),
    ],
)
def test_a_cycle_would_be_found_wherever_the_import_stands(tmp_path, text, in_a_circle):
    rows = tmp_path / "collectors" / "rows"
    rows.mkdir(parents=True)
    (tmp_path / "collectors" / "watch.py").write_text("from trainsentry.collectors.rows import batch")
    (rows / "other.py").write_text("")
    (rows / "batch.py").write_text(text)
    graph = room_graph(tmp_path)
    assert graph["collectors/watch"] == {"collectors/rows"}
    assert ("collectors/watch" in graph["collectors/rows"]) == in_a_circle
