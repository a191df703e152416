"""msprobe 26.2's own tools read our dumps; `make test-peer` builds their environment and runs this."""

import contextlib
import csv
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import debugged_ranks
import pytest
import torch
from debugged import Awkward, Tower, debug, read
from typer.testing import CliRunner

from trainsentry import PrecisionDebugger
from trainsentry.monitor.cli.app import app

PEERS = os.environ.get("TRAINSENTRY_PEERS", "")
pytestmark = pytest.mark.skipif(not PEERS, reason="TRAINSENTRY_PEERS is not set: make test-peer sets it")
KINDS = {"Awkward": Awkward, "Tower": Tower}


@pytest.fixture(autouse=True)
def _no_debugger_is_left():
    yield
    PrecisionDebugger.close()


def msprobe(*arguments):
    """Run a command of msprobe; return its output."""
    command = [str(Path(PEERS).with_name("msprobe")), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    lines = (done.stdout + done.stderr).splitlines()
    text = "\n".join(line for line in lines if "CANN environment" not in line)  # it always asks for an NPU's software
    assert done.returncode == 0, text
    assert "ERROR" not in text, text
    assert "Traceback" not in text, text
    return text


def theirs(folder, kind, task, level):
    script = Path(__file__).with_name("msprobe_dumps.py")
    subprocess.run([PEERS, script, folder, kind, task, level], check=True, capture_output=True, timeout=300)
    [dump] = (folder / "dump" / "step0").glob("*/dump.json")
    return dump


@pytest.mark.parametrize("kind", ["Awkward", "Tower"])
@pytest.mark.parametrize("task", ["statistics", "tensor"])
@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_compare_finds_our_forward_calls_equal_to_its_own(tmp_path, kind, task, level):
    debug(tmp_path / "ours", kind=KINDS[kind], task=task, level=level)
    golden = theirs(tmp_path / "theirs", kind, task, level)
    ours = tmp_path / "ours" / "dump" / "step0" / "rank0" / "dump.json"
    msprobe("compare", "--target_path", ours, "--golden_path", golden, "--output_path", tmp_path / "out")
    [table] = (tmp_path / "out").glob("compare_result_*.csv")
    with table.open(newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
    forward = [row for row in rows if ".forward" in row["NPU Name"] and row["Bench Name"] != "N/A"]
    assert len(forward) > 20
    assert {row["Result"].lower() for row in forward} <= {"pass", "", "n/a", "warning"}
    if task == "statistics":  # a warning compares rounding errors: that of a norm in fp32 with ours in fp64
        floats = [row for row in forward if "float" in row["NPU Dtype"] and row["NormRelativeErr"][:1].isdigit()]
        told = [row for row in floats if float(row["NPU l2norm"]) > 1e-6]  # what rounding leaves of 0 says nothing
        errors = [float(row["NormRelativeErr"].rstrip("%")) for row in told]
        assert max(errors) < 1e-4
    else:
        assert {row["Result"].lower() for row in forward} <= {"pass", "", "n/a"}


def test_compare_takes_steps_and_ranks(two_ranks, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        two_ranks.run(debugged_ranks.sharded, tmp_path / name, "ddp")
    paths = [tmp_path / name / "dump" / "step1" for name in ("a", "b")]
    msprobe("compare", "--target_path", paths[0], "--golden_path", paths[1], "--output_path", tmp_path / "out")
    assert len(list((tmp_path / "out").glob("compare_result_*"))) == 2


def test_overflow_check_finds_the_call_that_ours_finds(two_ranks, tmp_path):
    two_ranks.run(debugged_ranks.poisoned, tmp_path, 1)
    text = msprobe("overflow_check", "-i", tmp_path / "dump" / "step0", "-o", tmp_path / "out")
    [found] = (tmp_path / "out").glob("anomaly_analyze_*.json")
    assert "Module.blocks.0.fc1.Linear.forward.0" in found.read_text() or "Functional.linear.1" in found.read_text(), (
        text
    )


def rows(path):
    """Return the nodes of a graph file by step, rank, side and name: what a person sees of the tree."""
    columns = (
        "node_type, up_node, sub_nodes, node_order, precision_index, overflow_level, micro_step_id, matched_node_link"
    )
    with contextlib.closing(sqlite3.connect(path)) as database:
        found = database.execute(f"SELECT step, rank, data_source, node_name, {columns} FROM tb_nodes").fetchall()
    return {row[:4]: row[4:] for row in found}


@pytest.mark.parametrize("kind", ["Awkward", "Tower"])
@pytest.mark.parametrize("task", ["statistics", "tensor"])
@pytest.mark.parametrize("compared", [False, True])
def test_the_graph_builder_draws_of_our_dump_what_we_draw(tmp_path, kind, task, compared):
    for name in ("ours", "other"):
        torch.manual_seed(0)
        model = KINDS[kind]()
        with torch.no_grad():
            model.get_parameter("fc.weight" if kind == "Awkward" else "blocks.1.fc1.weight").mul_(
                1 + 39 * (name == "ours")
            )
        debug(tmp_path / name, steps=2, model=model, task=task, level="mix")
    ours, other = (tmp_path / name / "dump" for name in ("ours", "other"))
    golden = ["--golden_path", other] if compared else []
    msprobe("graph_visualize", "--target_path", ours, *golden, "--output_path", tmp_path / "out", "--overflow_check")
    [theirs] = (tmp_path / "out").glob("*.vis.db")
    done = CliRunner().invoke(
        app, ["graph", *map(str, [ours, other][: 1 + compared]), "-o", str(tmp_path), "--overflow-check"]
    )
    assert done.exit_code == 0, done.output
    drawn, expected = rows(tmp_path / "graph.vis.db"), rows(theirs)
    assert drawn.keys() == expected.keys()
    different = {key: (drawn[key], expected[key]) for key in drawn if drawn[key] != expected[key]}
    if task == "tensor":  # msprobe takes the worst of a collection before the elements are compared: always 0
        different = {key: value for key, value in different.items() if not key[3].startswith("Apis_Between_Modules")}
    assert different == {}


def test_the_python_of_the_peers_is_another():
    assert Path(PEERS).parent != Path(sys.executable).parent
    assert read
