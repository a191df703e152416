"""Torn, malformed or nested dumps of others are read as far as they go, in one pass."""

import json
import math
import os
import sys

import pytest
from written_files import fail

from trainsentry.anomaly.dumps.dump_comparison import compare_dumps
from trainsentry.anomaly.dumps.first_overflow import first_overflows
from trainsentry.exporters.dumps.dump_reader import read_dumps, read_possibly_torn
from trainsentry.exporters.files.foreign_files import InputError

FACTS = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2], "Max": 1.0, "Min": 0.0, "Norm": 1.0}


def dump(folder, data, **beside):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "dump.json").write_text(json.dumps({"task": "statistics", "data": data}, indent=1))
    for name, content in beside.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def failed_parses(function):
    """Return a function's result, and how many texts it tried to parse that were not JSON."""
    count = 0

    def seen(frame, event, _):
        nonlocal count
        code = frame.f_code
        count += event == "call" and code.co_name == "__init__" and code.co_filename.endswith("json/decoder.py")

    sys.setprofile(seen)
    try:
        return function(), count
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("calls", [20, 200])
def test_a_torn_dump_is_mended_by_a_fixed_number_of_passes_however_long_it_is(tmp_path, calls):
    tensors = [FACTS | {"Max": float(i)} for i in range(10)]
    entry = {"input_args": tensors, "output": tensors}
    dump(tmp_path, {f"Torch.relu.{i}.forward": entry for i in range(calls)})
    path = tmp_path / "dump.json"
    path.write_text(path.read_text()[: -len(json.dumps({"a": entry}, indent=1)) // 2])
    (content, torn), failed = failed_parses(lambda: read_possibly_torn(path))
    assert torn
    assert len(content["data"]) == calls - 1
    assert failed <= 8


def test_a_torn_dump_of_megabytes_is_read(tmp_path):
    lines = "\n".join(f'"not a member {i}"' for i in range(100_000))
    (tmp_path / "dump.json").write_text('{"task": "statistics",\n "data": {\n  "a": {"output": [1]},\n' + lines)
    (found, torn), failed = failed_parses(lambda: read_possibly_torn(tmp_path / "dump.json"))
    assert torn
    assert found == {"task": "statistics", "data": {"a": {"output": [1]}}}
    assert failed <= 8


@pytest.mark.parametrize("data", [[], 3, None, "x"])
def test_a_dump_whose_calls_are_something_else_is_named(tmp_path, data):
    with pytest.raises(InputError, match="data: holds a"):
        read_dumps(dump(tmp_path, data))


@pytest.mark.parametrize("data", [{"a": 3}, {"a": None}, {"a": []}])
def test_calls_of_wrong_types_are_left_out(tmp_path, data):
    problems = []
    found = read_dumps(dump(tmp_path, data), lambda *problem: problems.append(problem))
    assert first_overflows(found) == []
    assert found[0].calls == {}
    assert len(problems) == 1


@pytest.mark.parametrize("wrong", [3, [], "x", None, {"a": 1}, [[1], {}], 10**400, True])
def test_what_is_said_of_a_tensor_may_be_anything(tmp_path, wrong):
    facts = dict.fromkeys(("shape", "dtype", "Max", "Min", "Mean", "Norm", "md5", "data_name"), wrong)
    entry = {"input_args": wrong, "output": [facts, FACTS | {"Max": math.nan}], "overflow": wrong}
    dump(tmp_path, {"Torch.relu.0.forward": entry}, stack={"0": wrong, "1": [[wrong], [wrong]]}, construct={"a": wrong})
    [found] = read_dumps(tmp_path, fail)
    assert [o.call for o in first_overflows([found])] == ["Torch.relu.0.forward"]
    assert isinstance(found.stacks, dict)
    assert found.parents.keys() == {"a"}
    assert list(compare_dumps(found, found, {}))
    assert all(found.path_of(t) is None for t in found.tensors("Torch.relu.0.forward"))


def test_one_dump_that_cannot_be_read_does_not_hide_the_others(tmp_path):
    dump(tmp_path / "step0" / "rank0", {"Torch.relu.0.forward": {"output": [FACTS]}})
    (tmp_path / "step0" / "rank1").mkdir()
    os.mkfifo(tmp_path / "step0" / "rank1" / "dump.json")
    (tmp_path / "step0" / "rank2").mkdir()
    (tmp_path / "step0" / "rank2" / "dump.json").write_text('{"data": ' + "[" * 100_000)
    problems = []
    assert [d.rank for d in read_dumps(tmp_path, lambda *problem: problems.append(problem))] == [0]
    assert [path.parent.name for path, _, _ in problems] == ["rank1", "rank2"]
    with pytest.raises(InputError, match=r"rank1.*not a regular file"):
        read_dumps(tmp_path / "step0" / "rank1")


def test_files_beside_a_dump_may_be_pipes_or_nested(tmp_path):
    dump(tmp_path, {"Torch.relu.0.forward": {"output": [FACTS]}})
    (tmp_path / "dump_tensor_data").mkdir()
    os.mkfifo(tmp_path / "dump_tensor_data" / "mapping.csv")
    os.mkfifo(tmp_path / "stack.json")
    (tmp_path / "construct.json").write_text("[" * 100_000)
    [found] = read_dumps(tmp_path, fail)
    assert (found.stacks, found.parents) == ({}, {})
