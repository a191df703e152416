"""The benchmark of accelerators says where there is none, runs on the CPU to check itself, and judges each target."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "cost" / "on_device"))
from device_steps import OURS, V1, V2, Cell
from device_table import RATIOS, Tally, launches_table, steps_table, unmeasured_cells
from device_trainings import GPT, LLAMA

COST = Path(__file__).parents[2] / "benchmarks" / "cost"


def run(*args, script="gpu.py"):
    environment = {name: value for name, value in os.environ.items() if name != "TRAINSENTRY_PEERS"}
    done = subprocess.run([sys.executable, COST / script, *args], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("script", ["gpu.py", "host_steps.py"])
def test_without_a_device_it_says_so_in_one_line(script):
    [line] = run(script=script).splitlines()
    assert line.startswith("No accelerator")


def test_the_hosts_time_has_a_row_for_each_part_and_for_both_kinds_of_step():
    text = run("--tiny", "--device", "cpu", "--rounds", "1", script="host_steps.py")
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| ") and "ms a step" not in line]
    parts = ["nothing collected", "gradients", "parameters", "optimizer_state", "activations"]
    assert [row[0].strip() for row in rows] == ["no monitor", "default, no sample", "default, sample", *parts]
    bare, *others = [[float(cell) for cell in row[1:] if cell.strip()] for row in rows]
    assert all(added == pytest.approx(took - bare[0], abs=0.02) for took, added in others)


def test_tiny_models_on_the_cpu_fill_the_table_as_far_as_the_time_goes():
    text = run("--tiny", "--device", "cpu", "--seconds", "1", "--part", "steps")
    rows = [line for line in text.splitlines() if line.startswith(f"| {LLAMA} |")]
    assert len(rows) == 7
    assert " ms | **" in rows[0]
    assert "out of time" in rows[-1]


def cell(ours, v1, v2):
    return Cell(0.01, {OURS: [ours], V1: [v1], V2: [v2]}, {OURS: 8.0}, {})


@pytest.mark.parametrize(("ours", "met"), [(1.05, 3), (1.15, 2), (1.6, 0)])
def test_a_workload_is_judged_by_its_ratio_and_by_what_the_peers_add(ours, met):
    assert RATIOS[GPT, "gradients"] == 1.10
    tally = Tally()
    steps_table({(GPT, "gradients"): cell(ours, 6.5, 2.5)}, tally)
    assert (tally.met, tally.missed, tally.unmeasured) == (met, 3 - met, 0)


def test_what_was_not_measured_is_no_target_met():
    tally = Tally()
    steps_table(unmeasured_cells(), tally)
    assert (tally.met, tally.missed) == (0, 0)
    assert tally.unmeasured == len(unmeasured_cells())


def test_launches_stand_in_a_line_for_each_model_and_gaps_are_shown():
    lines = launches_table({(GPT, "gradients"): 2, (GPT, "all"): 70, (LLAMA, "gradients"): 3})
    assert lines[-2:] == [f"| {GPT} | – | – | +2 | – | – | – | +70 |", f"| {LLAMA} | – | – | +3 | – | – | – | – |"]
    assert "not counted" in "".join(launches_table({}))
