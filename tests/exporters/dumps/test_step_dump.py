"""A dump on disk is whole after every call, and torn files of others are read as far as they go."""

import json
from pathlib import Path

import numpy as np
import pytest

from trainsentry.exporters.dumps.dump_reader import read_dumps, read_possibly_torn
from trainsentry.exporters.dumps.step_dump import GrowingJson, StepDump
from trainsentry.exporters.files.foreign_files import InputError


def test_the_file_is_whole_after_each_member(tmp_path):
    path = tmp_path / "a" / "x.json"
    file = GrowingJson(path, {"task": "tensor", "level": None}, "data")
    assert json.loads(path.read_text()) == {"task": "tensor", "level": None, "data": {}}
    for i in range(50):
        file.add(f'name "{i}" ü', {"value": [i, float("nan"), None, "ü"]})
        assert len(json.loads(path.read_text())["data"]) == i + 1
    file.end({"left_out": ["a"]})
    assert json.loads(path.read_text())["left_out"] == ["a"]
    file.close()


def test_an_object_that_grows_itself(tmp_path):
    file = GrowingJson(tmp_path / "x.json")
    assert json.loads((tmp_path / "x.json").read_text()) == {}
    file.add("a", None)
    file.add("b", "a")
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": None, "b": "a"}


def test_stacks_are_whole_after_each_name_and_the_file_stays_small(tmp_path):
    dump = StepDump(tmp_path, {})
    for i in range(500):
        dump.stack(f"Functional.linear.{i}.forward", i % 3, ["File a.py, line 1, in f, \n g()"])
        if i % 50 == 0:
            stacks = json.loads((tmp_path / "stack.json").read_text())
            assert sum(len(names) for names, _ in stacks.values()) == i + 1
    assert (tmp_path / "stack.json").stat().st_size < 4 * 500 * 40
    dump.close()
    stacks = json.loads((tmp_path / "stack.json").read_text())
    assert [len(names) for names, _ in stacks.values()] == [167, 167, 166]


def test_names_cannot_leave_the_folder(tmp_path):
    path = StepDump(tmp_path, {}).tensor_path("../../evil.pt")
    assert path.parent == tmp_path / "dump_tensor_data"


def test_what_was_never_filled_can_be_taken_away(tmp_path):
    dump = StepDump(tmp_path / "step1" / "rank0", {})
    dump.discard()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("cut", [2, 4, 7, 40, 80])
def test_a_torn_file_is_read_as_far_as_it_goes(tmp_path, cut):
    file = GrowingJson(tmp_path / "dump.json", {"task": "statistics"}, "data")
    for i in range(5):
        file.add(f"Torch.relu.{i}.forward", {"input_args": [{"dtype": "torch.float32", "shape": [2], "Max": 1.0}]})
    text = (tmp_path / "dump.json").read_text()
    (tmp_path / "dump.json").write_text(text[:-cut])
    [dump] = read_dumps(tmp_path)
    assert dump.torn
    assert len(dump.calls) >= 4
    (tmp_path / "dump.json").write_text("no json")
    with pytest.raises(InputError, match="is not JSON"):
        read_possibly_torn(tmp_path / "dump.json")


def _write(directory: Path, stack):
    directory.mkdir(parents=True)
    facts = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2], "Max": 1.0}
    entry = {"input_args": [facts, {"type": "int", "value": 1}], "input_kwargs": {"b": facts}, "output": [[facts]]}
    data = {"Torch.relu.0.forward": entry, "Torch.relu.0.backward": {"input": [facts], "output": [None, facts]}}
    (directory / "dump.json").write_text(json.dumps({"task": "statistics", "data": data}))
    (directory / "stack.json").write_text(json.dumps(stack))
    (directory / "construct.json").write_text(json.dumps({"Torch.relu.0.forward": None}))


@pytest.mark.parametrize(
    ("place", "rank", "stack"),
    [
        ("step3/rank1", 1, {"0": [["Torch.relu.0.forward"], ["File a.py"]]}),
        ("step3/proc811", 0, {"0": [["Torch.relu.0.forward"], ["File a.py"]]}),
        ("step3/rank", 0, {"Torch.relu.0.forward": ["File a.py"]}),
    ],
)
def test_dumps_of_both_generations_are_read(tmp_path, place, rank, stack):
    _write(tmp_path / place, stack)
    for path in (tmp_path, tmp_path / "step3", tmp_path / place):
        [dump] = read_dumps(path)
        assert (dump.step, dump.rank) == (3, rank)
    assert dump.stacks == {"Torch.relu.0.forward": ["File a.py"]}
    assert [t.place for t in dump.tensors("Torch.relu.0.forward")] == ["input.0", "input.b", "output.0.0"]
    assert [t.place for t in dump.tensors("Torch.relu.0.backward")] == ["input.0", "output.1"]
    with pytest.raises(InputError, match="holds no dump"):
        read_dumps(tmp_path / "nowhere")


def test_a_torn_file_is_cut_at_its_own_lines_only(tmp_path):
    file = GrowingJson(tmp_path / "dump.json", {}, "data")
    for i in range(5):
        file.add(f"Torch.relu.{i}.forward", {"input_kwargs": {"how": {"type": "str", "value": "a\u2028b\x85c\x1cd"}}})
    path = tmp_path / "dump.json"
    path.write_bytes(path.read_bytes()[:-9])
    content, torn = read_possibly_torn(path)
    assert torn
    assert len(content["data"]) == 4


_NAN = float("nan")


@pytest.mark.parametrize(
    "value",
    [
        None,
        _NAN,
        [None, _NAN],
        {"Max": float("inf"), "Mean": None, "deeper": [{"Min": -float("inf")}]},
        {"args": [({"Mean": None, "shape": [2, 3]}, 1e-310)], "flags": [True, False]},
        2**70,
        "half of a pair: \ud800, ü and \x00",
        np.float64("nan"),
    ],
)
def test_what_is_added_is_read_back_as_it_was(tmp_path, value):
    file = GrowingJson(tmp_path / "x.json", {}, "data")
    file.add("a", value)
    read = json.loads((tmp_path / "x.json").read_text())["data"]["a"]
    assert repr(read) == repr(json.loads(json.dumps(value)))
