"""The tables are msprobe's, and come out the same in one go, after an interruption, and from several processes."""

import csv
import os
import sys

import pytest
from checked import call, check, dumped, tables, tensor, write_dump
from debugged import Tower

from trainsentry.exporters.files.foreign_files import InputError
from trainsentry.monitor.accuracy import worker_pool
from trainsentry.monitor.accuracy.check_run import CheckOptions, run_check


@pytest.fixture(scope="module")
def tower(tmp_path_factory):
    return dumped(tmp_path_factory.mktemp("tower"), Tower)


@pytest.fixture(scope="module")
def whole(tower, tmp_path_factory):
    return check(tower, tmp_path_factory.mktemp("whole"))


def content(summary):
    return [
        summary.result.with_name(summary.result.name.replace("result", p)).read_bytes() for p in ("result", "details")
    ]


def test_columns_and_cells_are_msprobes(whole):
    results, details = tables(whole)
    assert list(results["Functional.gelu.0"]) == [
        "API name",
        "Forward Test Success",
        "Backward Test Success",
        "Message",
    ]
    row = details["Functional.gelu.0.forward.output.0"]
    assert len(row) == 23
    assert (row["Bench Dtype"], row["DEVICE Dtype"], row["Shape"]) == ("torch.float64", "torch.float32", "(6, 16)")
    assert row["余弦相似度"] == "1.00000000000000"
    assert 0 < float(row["最大绝对误差"]) < 1e-6
    assert (row["二进制一致错误率"], row["ULP误差平均值"], row["inf/nan错误率"]) == (" ", " ", " ")
    assert float(details["Functional.linear.0.forward.output.0"]["ULP误差平均值"]) < 10
    assert float(details["Tensor.__add__.0.forward.output.0"]["相对误差错误率"]) == 0


@pytest.mark.parametrize("torn", [b"", b"Functional.gelu.0,pa"])
def test_an_interrupted_check_goes_on_where_it_stopped(tower, whole, tmp_path, torn):
    def stop(done, total, name):
        if done == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_check(CheckOptions(tower, tmp_path, processes=0), stop)
    [result] = tmp_path.glob("accuracy_checking_result_*.csv")
    details = result.with_name(result.name.replace("result", "details"))
    assert len(result.read_text().splitlines()) == 8
    with result.open("ab") as file:
        file.write(torn)
    with details.open("a") as file:  # details of a call whose result was not written
        file.write("Functional.gelu.1.forward.output.0" + "," * 22 + "\n")
    seen = []
    resumed = run_check(
        CheckOptions(tower, tmp_path, processes=0, resume=result), lambda done, total, name: seen.append(name)
    )
    assert content(resumed) == content(whole)
    assert len(seen) == len(whole.calls) - 7
    assert (resumed.counts, resumed.result) == (whole.counts, result)


def test_another_table_is_not_continued(tower, whole, tmp_path):
    other = tmp_path / "results.csv"
    other.write_bytes(whole.result.read_bytes())
    with pytest.raises(InputError, match="accuracy_checking_result_<14 digits>"):
        check(tower, tmp_path, resume=other)
    named = tmp_path / "accuracy_checking_result_20260101000000.csv"
    named.write_text("a,b\n")
    with pytest.raises(InputError, match="no such file"):
        check(tower, tmp_path, resume=named)
    (tmp_path / "accuracy_checking_details_20260101000000.csv").write_text("a,b\n")
    with pytest.raises(InputError, match="first line"):
        check(tower, tmp_path, resume=named)


def test_several_processes_write_the_same_tables_and_a_death_costs_one_call(tower, whole, tmp_path, monkeypatch):
    """The worker that gets the GELU dies; all else is as in one process."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, torch\ntorch.nn.functional.gelu = lambda *args, **kwargs: os.kill(os.getpid(), 9)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    only = ["Functional.gelu.0", "linear", "__add__"]
    shared = check(tower, tmp_path / "out", processes=2, devices=["cpu"], only=only)
    alone = [row for row in rows(whole.result) if {row[0], row[0].split(".")[1]} & set(only)]
    ours = rows(shared.result)
    assert [row[0] for row in ours] == [row[0] for row in alone]
    assert [row for row in ours if "gelu" not in row[0]] == [row for row in alone if "gelu" not in row[0]]
    died = [row for row in ours if "gelu" in row[0]]
    assert [row[1:] for row in died] == [["error", " ", "its process died (signal SIGKILL)"]]
    assert [c.call for c in shared.failures] == [row[0] for row in died]


def rows(path):
    with path.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.reader(file))[1:]


ECHO = """
import json, sys, time
for line in sys.stdin:
    name = json.loads(line)["call"]
    if name == "Torch.hang.0":
        time.sleep(600)
    if name == "Torch.exit.0":
        sys.exit(3)
    answer = {"call": name, "forward": "pass", "backward": " ", "message": "", "details": []}
    print(json.dumps(answer), flush=True)
"""


def test_a_worker_that_hangs_or_ends_is_replaced_and_the_order_is_the_dumps(tmp_path, monkeypatch):
    popen = worker_pool.subprocess.Popen
    monkeypatch.setattr(
        worker_pool.subprocess, "Popen", lambda command, **options: popen([sys.executable, "-c", ECHO], **options)
    )
    names = ["a", "hang", "b", "exit", *"cdefgh"]
    path = write_dump(tmp_path, {f"Torch.{name}.0.forward": call(tensor(2)) for name in names})
    summary = check(path, tmp_path / "out", processes=3, call_seconds=4.0)
    assert [c.call for c in summary.calls] == [f"Torch.{name}.0" for name in names]
    assert {c.call: c.message for c in summary.failures} == {
        "Torch.hang.0": "its process was ended after 4 s without a result",
        "Torch.exit.0": "its process died (exit status 3)",
    }
    assert summary.passed == len(names) - 2


def test_a_device_that_is_not_there_ends_the_check(tmp_path):
    path = write_dump(tmp_path, {"Torch.exp.0.forward": call(tensor(2))})
    with pytest.raises(InputError, match="--devices: 'cuda:7'"):
        check(path, tmp_path / "a", devices=["cuda:7"])


def test_calls_that_differ_in_values_only_are_left_out_on_request(tmp_path):
    entries = {
        "Torch.exp.0.forward": call(tensor(2)),
        "Torch.exp.1.forward": call(tensor(2, high=2.0)),
        "Torch.exp.2.forward": call(tensor(3)),
        "Torch.log.0.forward": call(tensor(2, low=1.0, high=2.0)),
    }
    path = write_dump(tmp_path, entries)
    filtered = check(path, tmp_path / "a", differing=True)
    assert [c.call for c in filtered.calls] == ["Torch.exp.0", "Torch.exp.2", "Torch.log.0"]
    chosen = check(path, tmp_path / "b", only=["exp"], without=["Torch.exp.1"])
    assert [c.call for c in chosen.calls] == ["Torch.exp.0", "Torch.exp.2"]
