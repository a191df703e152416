"""A trainer killed with -9 loses no step that had arrived: each is in the files once."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from written_files import fail

from trainsentry.exporters.csv.reader import read_table, table_files

TIMES = 24


def wait_for_recorders(root, seconds=60.0):
    """Wait until every recorder has written its last status."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        states = [json.loads(path.read_text())["state"] for path in root.glob("run*/rank0/status.json")]
        if "running" not in states:
            return
        time.sleep(0.2)
    raise AssertionError("a recorder has not ended")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_every_step_that_had_arrived_is_there_once(tmp_path):
    script = Path(__file__).parents[1] / "workers" / "killed_trainers.py"
    subprocess.run([sys.executable, str(script), str(tmp_path), str(TIMES), "7"], check=True, timeout=300)
    time.sleep(1.0)  # a recorder that was started last may not have written its first status yet
    wait_for_recorders(tmp_path)
    trained = 0
    for n in range(TIMES):
        noted = tmp_path / f"run{n}.handed"
        handed = [int(line) for line in noted.read_text().split()] if noted.exists() else []
        if not handed:
            continue
        trained += 1
        tables = table_files(tmp_path / f"run{n}" / "rank0")
        for table, count in (("gradient", 4), ("parameter", 4), ("exp_avg_sq", 4)):
            if table not in tables and handed[-1] == 0:
                continue  # the optimizer has no state before its first update
            counts = Counter(row.step for rows in read_table(tables[table], fail) for row in rows)
            first = 1 if table == "exp_avg_sq" else 0
            assert set(range(first, handed[-1] + 1)) <= set(counts), (n, table)
            assert set(counts.values()) == {count}, (n, table)
    assert trained >= TIMES // 2
