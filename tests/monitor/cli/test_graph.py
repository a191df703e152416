"""`trainsentry graph` writes what msprobe's TensorBoard plugin shows, and refuses what holds no graph in one line."""

import json
import shutil
import sqlite3
import stat

import pytest
import torch
from debugged import Tower, debug
from graph_plugin import PLUGINS, Opened, plugin
from tiny_models import flip_bit, mlp, train
from typer.testing import CliRunner

import trainsentry
from trainsentry import PrecisionDebugger
from trainsentry.monitor.cli.app import app

BROKEN = "Module.blocks.1.fc1.Linear.forward.0"


def invoke(*args):
    return CliRunner().invoke(app, [str(a) for a in args])


def graph(*args):
    done = invoke("graph", *args)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(autouse=True)
def _no_debugger_is_left():
    yield
    PrecisionDebugger.close()


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    """Dumps of a model, of it with one weight scaled, and with that weight infinite; with tensors, and without."""
    folder = tmp_path_factory.mktemp("dumps")
    for task in ("statistics", "tensor"):
        for name, factor in (("good", 1.0), ("off", 40.0), ("inf", float("inf"))):
            torch.manual_seed(0)
            model = Tower()
            with torch.no_grad():
                model.blocks[1].fc1.weight.mul_(factor)
            debug(folder / f"{name}_{task}", steps=2, model=model, task=task, level="mix")
    return {path.name: path / "dump" for path in folder.iterdir()}


@pytest.fixture(scope="module")
def broken_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "monitor_output"
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with trainsentry.TrainMonitor({"output_dir": str(out)}).watch(model, optimizer) as monitor:
        train(model, optimizer, 25, monitor, before_step=lambda s: flip_bit(model[2].weight, 3) if s == 13 else None)
    return out


def nodes(path, step=0, side="NPU"):
    """Return the rows of a database's nodes by name."""
    with sqlite3.connect(path) as database:
        database.row_factory = sqlite3.Row
        rows = database.execute("SELECT * FROM tb_nodes WHERE step = ? AND data_source = ?", (step, side))
        return {row["node_name"]: dict(row) for row in rows.fetchall()}


def config(path):
    with sqlite3.connect(path) as database:
        database.row_factory = sqlite3.Row
        return dict(database.execute("SELECT * FROM tb_config").fetchone())


def test_a_dump_becomes_a_tree_of_calls_with_their_values(dumps, tmp_path):
    graph(dumps["good_statistics"], "-o", tmp_path)
    path = tmp_path / "graph.vis.db"
    found = nodes(path)
    construct = json.loads((dumps["good_statistics"] / "step0" / "rank0" / "construct.json").read_text())
    assert construct.keys() <= found.keys()
    assert found[BROKEN]["up_node"] == "Module.blocks.1.Block.forward.0"
    assert json.loads(found["Module.blocks.1.Block.forward.0"]["sub_nodes"])[:2] == [
        "Module.blocks.1.norm.LayerNorm.forward.0",
        BROKEN,
    ]
    values = json.loads(found[BROKEN]["input_data"])
    weight = values[f"{BROKEN}.parameters.weight"]
    assert (weight["shape"], weight["dtype"], weight["requires_grad"]) == ("[16, 8]", "torch.float32", "True")
    assert found[BROKEN.replace("forward.0", "parameters_grad.0")]["up_node"] == BROKEN.replace("forward", "backward")
    assert {row["precision_index"] for row in found.values()} == {None}
    assert (json.loads(config(path)["step_list"]), config(path)["graph_type"]) == ([0, 1], "build")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(("task", "mode"), [("statistics", "summary"), ("tensor", "all")])
def test_two_dumps_are_matched_and_the_call_that_differs_is_an_error(dumps, tmp_path, task, mode):
    output = graph(dumps[f"off_{task}"], dumps[f"good_{task}"], "-o", tmp_path)
    assert f"compared by {mode}" in output
    assert "0 without a match" in output
    found = nodes(tmp_path / "graph.vis.db")
    assert {
        found[name]["precision_index"] for name in ("Module.first.Linear.forward.0", "Functional.gelu.0.forward")
    } == {0}
    assert found["Module.blocks.1.fc2.Linear.forward.0"]["precision_index"] == 0  # its inputs differ already
    first_wrong = [name for name, row in found.items() if row["precision_index"]]
    assert first_wrong[0].startswith(("Functional.linear.4", "Functional.gelu.1", "Module.blocks.1", "Tensor."))
    other = nodes(tmp_path / "graph.vis.db", side="Bench")
    assert json.loads(found[BROKEN]["matched_node_link"]) == [
        "DefaultModel", "Module.blocks.1.Block.forward.0", BROKEN
    ]  # fmt: skip
    assert other.keys() == found.keys()


def test_equal_dumps_are_equal_everywhere(dumps, tmp_path):
    assert " 0 warning, 0 error" in graph(dumps["good_tensor"], dumps["good_tensor"], "-o", tmp_path)


def test_overflow_marks_tell_who_made_it_from_who_passed_it_on(dumps, tmp_path):
    graph(dumps["inf_statistics"], "-o", tmp_path, "--overflow-check")
    found = nodes(tmp_path / "graph.vis.db")
    assert found["Module.blocks.0.fc1.Linear.forward.0"]["overflow_level"] is None
    assert found[BROKEN]["overflow_level"] == "critical"
    assert found["Module.last.Linear.forward.0"]["overflow_level"] == "high"
    assert config(tmp_path / "graph.vis.db")["overflow_check"] == 1


def test_the_modules_of_a_run_carry_its_statistics_and_its_incident(broken_run, tmp_path):
    graph(broken_run, "-o", tmp_path)
    path = tmp_path / "graph.vis.db"
    assert 13 in json.loads(config(path)["step_list"])
    found = nodes(path, step=13)
    culprit = found["Module.2.Linear.forward.0"]
    assert (culprit["up_node"], culprit["overflow_level"]) == ("Module.Sequential.forward.0", "critical")
    assert found["Module.Sequential.forward.0"]["overflow_level"] == "critical"
    weight = json.loads(culprit["input_data"])["Module.2.Linear.forward.0.parameters.2.weight".replace("s.2.", "s.")]
    assert "suspect 1" in weight["found"]
    assert float(weight["Norm"]) > 0
    with sqlite3.connect(path) as database:
        [stack] = database.execute("SELECT stack_info FROM tb_stack WHERE id = ?", (culprit["stack_id"],)).fetchone()
    assert "incident 1, suspect 1" in stack


def test_two_runs_are_compared_at_the_steps_that_tell_in_the_first(broken_run, tmp_path):
    output = graph(broken_run, broken_run, "-o", tmp_path)
    assert "0 warning, 0 error, 0 without a match" in output


def test_msprobes_spelling_writes_msprobes_file_name(dumps, tmp_path):
    done = invoke(
        "graph_visualize", "-tp", dumps["off_statistics"], "-gp", dumps["good_statistics"], "-o", tmp_path, "-oc"
    )
    assert done.exit_code == 0, done.output
    assert len(list(tmp_path.glob("compare_*.vis.db"))) == 1


def test_names_and_order_match_what_was_renamed_or_counted_otherwise(dumps, tmp_path):
    copied = shutil.copytree(dumps["good_statistics"] / "step0" / "rank0", tmp_path / "other")
    for file in copied.glob("*.json"):
        text = (
            file.read_text()
            .replace("Module.blocks.", "Module.layers.")
            .replace("Functional.gelu.0", "Functional.gelu.7")
        )
        file.write_text(text)
    names = tmp_path / "names.json"
    names.write_text('{"Module.blocks.": "Module.layers."}')
    source = dumps["good_statistics"] / "step0" / "rank0"
    assert "0 without a match" not in graph(source, copied, "-o", tmp_path / "plain", "--names", names)
    renamed = nodes(tmp_path / "plain" / "graph.vis.db")
    assert json.loads(renamed[BROKEN]["matched_node_link"])[-1] == BROKEN.replace("blocks", "layers")
    assert renamed["Functional.gelu.0.forward"]["matched_node_link"] == "[]"
    fuzzy = graph(source, copied, "-o", tmp_path / "fuzzy", "--names", names, "--fuzzy")
    gelu = nodes(tmp_path / "fuzzy" / "graph.vis.db")["Functional.gelu.0.forward"]
    assert "0 warning, 0 error" in fuzzy
    assert json.loads(gelu["matched_node_link"])[-2:] == [
        "Module.layers.0.Block.forward.0",
        "Functional.gelu.7.forward",
    ]


def test_a_source_without_a_graph_is_one_line_and_leaves_no_file(dumps, tmp_path, broken_run):
    torn = shutil.copytree(dumps["good_statistics"] / "step0", tmp_path / "torn")
    (torn / "rank0" / "construct.json").write_text('{"Module.a')
    without = shutil.copytree(dumps["good_statistics"] / "step0", tmp_path / "without")
    (without / "rank0" / "construct.json").unlink()
    (tmp_path / "empty").mkdir()
    (tmp_path / "bare" / "rank0").mkdir(parents=True)
    (tmp_path / "bare" / "run.json").write_text("{}")
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "dump.json").write_bytes(b"\x80\x04K\x01.")
    out = tmp_path / "out"
    for sources, words in (
        ([torn], "construct.json is missing or empty"),
        ([without], "level L0 or mix"),
        ([tmp_path / "empty"], "holds no dump"),
        ([tmp_path / "bare"], "no rank has a graph.json"),
        ([tmp_path / "pickled"], "not JSON"),
        ([tmp_path / "nothing"], "no such directory"),
        ([dumps["good_statistics"], broken_run], "a monitored run and a dump"),
        ([dumps["good_statistics"], "--steps", "70-80"], "no dump of the steps"),
    ):
        done = invoke("graph", *sources, "-o", out)
        assert (done.exit_code, words in done.output) == (2, True), done.output
        assert len(done.output.splitlines()) == 1
        assert not list(tmp_path.glob("out/*.vis*"))


def test_one_rank_without_a_tree_is_reported_and_the_others_are_drawn(dumps, tmp_path):
    ranks = shutil.copytree(dumps["good_statistics"] / "step0", tmp_path / "step0")
    shutil.copytree(ranks / "rank0", ranks / "rank1")
    (ranks / "rank1" / "construct.json").unlink()
    output = graph(ranks, "-o", tmp_path)
    assert "rank1: construct.json is missing or empty" in output
    assert json.loads(config(tmp_path / "graph.vis.db")["rank_list"]) == [0]


def test_a_truncated_dump_is_drawn_as_far_as_it_goes(dumps, tmp_path):
    cut = shutil.copytree(dumps["good_statistics"] / "step0", tmp_path / "cut")
    path = cut / "rank0" / "dump.json"
    path.write_text(path.read_text()[: path.stat().st_size // 2])
    graph(cut, "-o", tmp_path)
    found = nodes(tmp_path / "graph.vis.db")
    assert json.loads(found["Module.first.Linear.forward.0"]["output_data"])
    assert json.loads(found["Module.first.Linear.backward.0"]["output_data"]) == {}


@pytest.mark.parametrize("name", PLUGINS)
def test_the_plugins_own_loaders_return_our_nodes_matches_and_colours(dumps, tmp_path, name):
    module = plugin(name)
    graph(dumps["off_statistics"], dumps["good_statistics"], "-o", tmp_path)
    opened = Opened(module, tmp_path / "graph.vis.db")
    assert (opened.config["isSingleGraph"], opened.config["steps"], opened.config["task"]) == (False, [0, 1], "summary")
    assert [colour["accuracy_level"] for colour in opened.config["colors"].values()] == [
        "pass", "warning", "error", "unmatched node"
    ]  # fmt: skip
    ours = nodes(tmp_path / "graph.vis.db")
    assert set(opened.listed["npuNodeList"]) == set(opened.listed["benchNodeList"]) == ours.keys()
    block = "Module.blocks.1.Block.forward.0"
    drawn = opened.drawn(block, side="NPU")
    for parent in ("DefaultModel", block):
        children = [name for name, node in drawn.items() if node["parentNode"] == parent]
        assert children == json.loads(ours[parent]["sub_nodes"])
    assert {node["precisionIndex"] for node in drawn.values()} >= {0, 0.5}
    assert all(node["precisionIndex"] == ours[name]["precision_index"] for name, node in drawn.items())
    both = opened.info(BROKEN, "NPU")
    assert both["npu"]["upnode"] == both["bench"]["upnode"] == "Module.blocks.1.Block.forward.0"
    assert both["npu"]["data"]["precision_index"] == ours[BROKEN]["precision_index"]
    assert both["npu"]["input_data"][f"{BROKEN}.parameters.weight"]["NormRelativeErr"].startswith("3900.0000")


@pytest.mark.parametrize("name", PLUGINS)
def test_the_plugins_own_search_finds_our_overflow_marks(dumps, tmp_path, name):
    module = plugin(name)
    graph(dumps["inf_statistics"], "-o", tmp_path, "--overflow-check")
    opened = Opened(module, tmp_path / "graph.vis.db")
    assert (opened.config["overflowCheck"], opened.config["isSingleGraph"]) == (True, True)
    leaves = {
        key
        for key, row in nodes(tmp_path / "graph.vis.db").items()
        if row["overflow_level"] == "high" and not row["sub_nodes"]
    }
    assert opened.drawn()["Module.blocks.1.Block.forward.0"]["overflowLevel"] == "critical"
    assert opened.with_overflow(["high"]) == leaves != set()


def test_the_plugin_that_reads_json_reads_ours(dumps, tmp_path):
    module = plugin("tb-graph-ascend 8.3")
    graph(dumps["off_statistics"], dumps["good_statistics"], "-o", tmp_path, "--format", "vis", "--overflow-check")
    opened = Opened(module, tmp_path / "step0_rank0.vis", "json")
    assert opened.config["microSteps"] == 1
    assert opened.listed["npuMatchNodes"][BROKEN] == BROKEN
    assert opened.listed["npuUnMatchNodes"] == []
    block = "Module.blocks.1.Block.forward.0"
    assert opened.info(BROKEN, "NPU")["bench"]["upnode"] == block
    assert BROKEN in opened.drawn(block, side="NPU")
