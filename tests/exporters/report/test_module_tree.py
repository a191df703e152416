"""The tree of modules shows where the trouble sits, in any model, and can be searched."""

import asyncio

import pytest
from browser import needs_chromium, opened
from recorded_runs import CULPRIT, make_run

from trainsentry.exporters.files.json_files import replace_json
from trainsentry.exporters.report import module_tree as tree
from trainsentry.exporters.report.data import gather
from trainsentry.exporters.report.page import write_report


def fail(*problem):
    raise AssertionError(problem)


def with_modules(root, names, rank=0):
    """Give a run a model; parents without a line of their own are left out, as a ModuleList that never ran is."""
    modules = [{"name": name, "type": "Linear" if name else "Gpt", "parent": None, "vpp_stage": 0} for name in names]
    replace_json(root / f"rank{rank}" / "graph.json", {"order": "execution", "modules": modules})


def layers(n):
    return ["", *(name for i in range(n) for name in (f"layers.{i}", f"layers.{i}.mlp"))]


def walk(node):
    yield node
    for child in node.children.values():
        yield from walk(child)


def nodes(root):
    data = gather(root, fail)
    whole, left_out = tree.module_tree(data.run, data.anomalies)
    return {node.name: node for node in walk(whole)}, left_out


def test_the_culprits_module_and_the_way_to_it_stand_out(tmp_path):
    make_run(tmp_path)
    with_modules(tmp_path, layers(6))
    found, left_out = nodes(tmp_path)
    culprit = found[CULPRIT.rpartition(".")[0]]
    assert (culprit.state, culprit.incidents, left_out) == (tree.SUSPECT, [1], 0)
    assert {name for name, node in found.items() if node.worst == tree.SUSPECT} == {
        "",
        "layers",
        "layers.3",
        "layers.3.mlp",
    }
    assert {node.state for name, node in found.items() if name != culprit.name} == {tree.HEALTHY}
    assert list(found["layers"].children) == [str(i) for i in range(6)]


def test_stages_of_a_pipeline_are_one_model(tmp_path):
    make_run(tmp_path, ranks=2)
    with_modules(tmp_path, ["", "layers.3", "layers.3.mlp"])
    with_modules(tmp_path, ["", "layers.4", "layers.4.mlp"], rank=1)
    found, _ = nodes(tmp_path)
    assert {"layers.3.mlp", "layers.4.mlp"} <= set(found)


def test_of_a_very_large_model_the_abnormal_modules_are_shown(tmp_path, monkeypatch):
    make_run(tmp_path)
    with_modules(tmp_path, layers(500))
    monkeypatch.setattr(tree, "MOST_MODULES", 20)
    found, left_out = nodes(tmp_path)
    assert found["layers.3.mlp"].state == tree.SUSPECT
    assert (left_out, len(found) <= 40) == (1001 - 20, True)


@pytest.mark.parametrize("name", ["a." * 5000 + "b", "<script>alert(1)</script>", "layers..mlp", ""])
def test_any_name_is_shown_and_none_breaks_the_page(tmp_path, name):
    make_run(tmp_path)
    with_modules(tmp_path, ["", name])
    page = write_report(tmp_path).read_text()
    assert "<script>alert" not in page
    assert 'class="tree"' in page


def test_without_a_graph_there_is_no_tree(tmp_path):
    make_run(tmp_path)
    assert 'class="tree"' not in write_report(tmp_path).read_text()
    (tmp_path / "rank0" / "graph.json").write_text('{"modules": [3, {"name": 5}')
    assert 'class="tree"' not in write_report(tmp_path).read_text()


@needs_chromium
def test_a_search_leaves_what_matches_and_its_parents(tmp_path):
    make_run(tmp_path)
    with_modules(tmp_path, layers(6))
    address = write_report(tmp_path).as_uri()

    async def look():
        async with opened(address) as page:
            await page.wait_for("document.querySelectorAll('.tree li').length == 14")
            assert await page.ask("document.querySelector('.tree a').textContent") == "suspect of #1"
            assert await page.ask("document.querySelector('.tree a').checkVisibility()")
            await page.ask("find.value = 'LAYERS.4'; find.dispatchEvent(new Event('input')), 0")
            shown = (
                "[...document.querySelectorAll('.tree li')].filter(e => e.checkVisibility()).map(e => e.dataset.name)"
            )
            names = [name.split()[0] if name.strip() else "" for name in await page.ask(shown)]
            assert page.problems == []
            return names, await page.ask("matches.textContent")

    names, told = asyncio.run(look())
    assert names == ["gpt", "layers", "layers.4", "layers.4.mlp"]
    assert told == "2 found"
