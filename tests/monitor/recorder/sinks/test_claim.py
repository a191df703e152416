"""No two runs in a directory share a restart number, and a dead run blocks no other."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
import watched
from forked_scripts import Script, start_forked
from tiny_models import train
from watched import STEPS, make, rows, status

from trainsentry.monitor.recorder.sinks import claim
from trainsentry.monitor.recorder.sinks.claim import claim_start, release, renew

SCRIPT = """
import logging, sys
from tiny_models import train
from watched import make
logging.basicConfig(level=logging.WARNING)
model, optimizer, monitor = make(sys.argv[1])
print("watching", flush=True)
input()
with monitor:
    train(model, optimizer, 12, monitor)
print("trained", flush=True)
"""


def begin(out):
    process = start_forked(Script(SCRIPT, [out]), path=[Path(watched.__file__).parent])
    assert process.stdout.readline() == "watching\n"
    return process


def claims(directory):
    return sorted(path.name for path in directory.glob(".start.*"))


def test_two_runs_at_once_in_one_directory_share_no_file_and_the_second_says_so(out):
    first, second = begin(out), begin(out)
    _, told_first = first.communicate("\n", timeout=120)
    _, told = second.communicate("\n", timeout=120)
    assert "another run" not in told_first
    assert f"another run is writing to {out} (process {first.pid} on" in told
    for name in ("gradient_0-999.csv", "gradient_0-999.r1.csv"):
        steps = Counter(pd.read_csv(out / "rank0" / name)["step"])
        assert steps == dict.fromkeys(range(12), 4), name
    for name in ("rank0/status.json", "rank0/status.r1.json", "run.json", "run.r1.json"):
        assert json.loads((out / name).read_text()), name
    assert status(out)["state"] == "closed"
    assert claims(out / "rank0") == []


def test_a_run_that_was_killed_blocks_nobody(out, caplog):
    killed = begin(out)
    killed.kill()
    killed.communicate()
    end = time.monotonic() + 60
    while claims(out / "rank0") and time.monotonic() < end:  # its recorder gives the claim back
        time.sleep(0.05)
    model, optimizer, monitor = make(out)
    with monitor:
        train(model, optimizer, STEPS, monitor)
    assert not any("another run" in r.getMessage() for r in caplog.records)
    assert sum(count for path in (out / "rank0").glob("gradient_*") for count in [len(pd.read_csv(path))]) == STEPS * 4


def test_a_claim_that_nobody_could_give_back_is_removed(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", "pass"])
    dead.wait()
    holder = {**claim._machine(), "pid": dead.pid, "began": "12345"}
    (tmp_path / ".start.r0.json").write_text(json.dumps(holder))
    found = claim_start(tmp_path, 0)
    assert (found.restart, found.rivals) == (1, ())
    assert claims(tmp_path) == [".start.r1.json"]


def test_a_process_of_the_same_number_that_began_later_is_another(tmp_path):
    holder = {**claim._machine(), "pid": os.getpid(), "began": "1"}
    (tmp_path / ".start.r0.json").write_text(json.dumps(holder))
    if not Path("/proc/self/stat").exists():
        pytest.skip("when a process began is not told here")
    assert claim_start(tmp_path, 0).rivals == ()


@pytest.mark.parametrize(("age", "rivals"), [(0.0, 1), (2 * claim.STALE_SECONDS, 0)])
def test_a_claim_of_another_host_holds_while_it_is_renewed(tmp_path, age, rivals):
    path = tmp_path / ".start.r0.json"
    path.write_text(json.dumps({"host": "elsewhere", "boot": "b", "pids": "p", "pid": 1, "began": "1"}))
    then = path.stat().st_mtime - age
    os.utime(path, (then, then))
    found = claim_start(tmp_path, 0)
    assert len(found.rivals) == rivals
    assert found.beside == bool(rivals)
    assert path.exists() == bool(rivals)


def test_many_at_once_get_numbers_of_their_own(tmp_path):
    code = """
import sys
from pathlib import Path
from trainsentry.monitor.recorder.sinks.claim import claim_start
sys.stdin.read(1)
print([claim_start(Path(sys.argv[1]), 0).restart for _ in range(20)])
"""
    started = [start_forked(Script(code, [tmp_path])) for _ in range(4)]
    numbers = []
    for process in started:
        process.stdin.write("x")
        process.stdin.flush()
    for process in started:
        numbers += json.loads(process.communicate()[0])
    assert len(numbers) == len(set(numbers)) == 80


def test_a_claim_that_was_removed_with_its_directory_is_made_anew_and_given_back(tmp_path):
    found = claim_start(tmp_path / "rank0", 0)
    told = found.to_json()
    found.path.unlink()
    (tmp_path / "rank0").rmdir()
    renew(told)
    assert claim_start(tmp_path / "rank0", 0).rivals
    release(told)
    assert claims(tmp_path / "rank0") == [".start.r1.json"]


def test_a_directory_that_cannot_be_written_is_no_reason_to_stop(tmp_path):
    (tmp_path / "file").write_text("")
    found = claim_start(tmp_path / "file" / "rank0", 3)
    assert (found.path, found.restart) == (None, 3)
    renew(found.to_json())
    release(found.to_json())


def test_a_run_beside_another_leaves_its_restart_number_to_it(out):
    process = begin(out)
    model, optimizer, monitor = make(out)
    with monitor:
        train(model, optimizer, STEPS, monitor)
    assert rows(out, name="_0-999.r1.csv") == dict.fromkeys(range(STEPS), 4)
    assert (out / "rank0" / "graph.r1.json").exists()
    process.communicate("\n", timeout=120)
    assert rows(out) == dict.fromkeys(range(12), 4)


def test_a_monitor_that_takes_over_a_directory_writes_beside_the_older_one(out):
    first, one, a = make(out)
    train(first, one, 3, a)
    second, two, b = make(out)  # closes the older
    with b:
        train(first, one, 3)
        train(second, two, 3, b)
    for name in ("gradient_0-999.csv", "gradient_0-999.r1.csv"):
        table = pd.read_csv(out / "rank0" / name)
        assert not table.duplicated(["name", "step"]).any()
