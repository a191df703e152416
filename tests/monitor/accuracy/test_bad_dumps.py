"""Damaged dumps get one line a call, are counted, end with status 1 or 2, and never run anything that they hold."""

import json
import os
import pickle
from importlib.util import find_spec

import pytest
from checked import call, dumped, tensor, write_dump
from debugged import Tower
from typer.testing import CliRunner

from trainsentry.monitor.cli.app import app


def run(*arguments):
    return CliRunner().invoke(app, ["check", *map(str, arguments), "--processes", "0"])


def lines_about(result, name):
    return [line for line in (result.stdout + result.stderr).splitlines() if name in line]


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_missing_and_dangerous_tensors_cost_their_calls_and_nothing_is_unpickled(tmp_path):
    dump = dumped(tmp_path, Tower, task="tensor")
    folder = dump / "dump_tensor_data"
    (folder / "Functional.gelu.0.forward.input.0.pt").unlink()
    (folder / "Functional.gelu.1.forward.input.0.pt").write_bytes(pickle.dumps(Bomb(tmp_path / "bomb")))
    (folder / "Functional.linear.0.forward.input.0.pt").write_bytes(b"\x80\x02torn")
    result = run(dump, "-o", tmp_path / "out")
    assert result.exit_code == 1
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert not (tmp_path / "bomb").exists()
    for name, reason in (
        ("Functional.gelu.0", "no such file"),
        ("Functional.gelu.1", "is no saved tensor"),
        ("Functional.linear.0", "is no saved tensor"),
    ):
        [line] = lines_about(result, f"{name}:")
        assert "cannot be checked" in line
        assert reason in line
    assert "0 failed, 0 with a warning, 0 not compared, 3 could not be checked" in result.stdout


def test_vanished_functions_damaged_entries_and_odd_names_are_counted(tmp_path):
    entries = {
        "Torch.exp.0.forward": call(tensor(3)),
        "Torch.vanished.0.forward": call(tensor(3)),
        "Torch.log.0.forward": 7,
        "Torch.sin.0.forward": {"input_args": 5},
        "Torch.cos.0.forward": {"input_args": [[[[[[[[[[[[[[[[[[[3]]]]]]]]]]]]]]]]]]]},
        "Odd.forward": call(tensor(3)),
        "Distributed.all_reduce.0.forward": call(tensor(3)),
        "Module.fc.Linear.forward.0": call(tensor(3)),
    }
    result = run(write_dump(tmp_path, entries), "-o", tmp_path / "out")
    assert result.exit_code == 1
    assert "6 calls: 1 passed, 0 failed, 0 with a warning, 1 not compared, 5 could not be checked" in result.stdout
    for name in ("Torch.vanished.0", "Torch.log.0", "Torch.sin.0", "Torch.cos.0", "Odd"):
        assert len(lines_about(result, name)) == 1, name
    assert "1 call not compared: communicates with other ranks" in result.stdout


def test_of_a_torn_dump_the_whole_calls_are_checked(tmp_path):
    path = write_dump(tmp_path, {f"Torch.exp.{i}.forward": call(tensor(3)) for i in range(5)})
    path.write_text(path.read_text()[:-100])
    result = run(path, "-o", tmp_path / "out")
    assert result.exit_code == 1
    assert "is truncated" in result.stderr
    assert "calls: 4 passed" in result.stdout


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"data": 3}', '{"data": {}}', "\x00\xff", '{"a": ' * 200])
def test_what_is_no_dump_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / "dump.json"
    path.write_text(content, encoding="latin-1")
    result = run(path, "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_wrong_options_and_dumps_of_others_are_refused(tmp_path):
    path = write_dump(tmp_path / "a", {"exp.0.forward": call(tensor(3))}, framework="jax")
    assert "holds calls of jax; allowed: pytorch, mindspore, mindtorch" in run(path).stderr
    path = write_dump(tmp_path / "c", {"Torch.exp.0.forward": call(tensor(3))}, framework="mindtorch")
    assert (
        "holds calls of mindtorch; allowed: where `import torch` is MSAdapter's"
        in run(path, "-o", tmp_path / "x").stderr
    )
    if find_spec("mindspore") is None:
        path = write_dump(tmp_path / "d", {"Mint.exp.0.forward": call(tensor(3))}, framework="mindspore")
        assert "holds calls of mindspore: No module named 'mindspore'" in run(path, "-o", tmp_path / "y").stderr
    ours = write_dump(tmp_path / "b", {"Torch.exp.0.forward": call(tensor(3))})
    assert "--rule: 'best'; allowed: standards, run_ut, mindspore" in run(ours, "--rule", "best").stderr
    assert "--data random draws" in run(ours, "--data", "real").stderr
    assert "give one of them" in run(tmp_path).stderr
    assert run(tmp_path / "nowhere").exit_code == 2


def test_msprobes_options_are_read(tmp_path):
    path = write_dump(
        tmp_path,
        {f"Torch.exp.{i}.forward": call(tensor(3)) for i in range(3)}
        | {"Torch.log.0.forward": call(tensor(3, low=1.0, high=2.0))},
    )
    lists = tmp_path / "config.json"
    lists.write_text(json.dumps({"task": "run_ut", "run_ut": {"white_list": ["exp"], "black_list": []}}))
    out = tmp_path / "out"
    arguments = ["-api_info", str(path), "-o", str(out), "-d", "0", "-f", "-config", str(lists), "-save_error_data"]
    result = CliRunner().invoke(app, ["run_ut", *arguments])
    assert (result.exit_code, "1 call: 1 passed" in result.stdout) == (0, True)
    [table] = out.glob("accuracy_checking_result_*.csv")
    again = CliRunner().invoke(
        app, ["multi_run_ut", "-api_info", str(path), "-csv_path", str(table), "-f", "-n", "2", "-d", "0", "1", "-j"]
    )
    assert (again.exit_code, "2 calls: 2 passed" in again.stdout) == (0, True)
    assert CliRunner().invoke(app, ["run_ut", "-o", "x"]).exit_code == 2
