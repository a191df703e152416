"""Only plain files of bounded size are read; an error names the file, and the rest of a file is kept."""

import json
import os
from pathlib import Path

import pytest
from limited_memory import run_within
from written_files import fail

from trainsentry.exporters.files.foreign_arrays import read_array
from trainsentry.exporters.files.foreign_fields import checked, number, objects, sizes, statistic, text, whole
from trainsentry.exporters.files.foreign_files import (
    MAX_DEPTH,
    MAX_LINE_BYTES,
    InputError,
    complete_members,
    open_file,
    parse_json,
    read_lines,
    read_object,
)
from trainsentry.exporters.run_reader import anomalies_since, last_anomalies, last_scalars, read_run


@pytest.mark.parametrize("depth", [MAX_DEPTH + 2, 900, 100_000])
@pytest.mark.parametrize("ends", [("[", "]"), ('{"a":', "}")])
def test_json_nested_too_deep_is_one_error(depth, ends):
    text_of_it = ends[0] * depth + "1" + ends[1] * depth
    with pytest.raises(InputError, match="nested deeper"):
        parse_json(text_of_it)


def test_json_as_deep_as_our_own_is_read():
    assert parse_json("[" * MAX_DEPTH + "]" * MAX_DEPTH)


def test_half_a_surrogate_pair_is_read_as_what_can_be_written():
    found = parse_json('{"a\\ud800": "\\ud83d\\ude00 \\\\ud800 \\udc00\\udc00"}')
    assert found == {"a\\ud800": "😀 \\ud800 \\udc00\\udc00"}
    json.dumps(found, ensure_ascii=False).encode()


@pytest.mark.parametrize("reader", [open_file, read_object, lambda p: list(read_lines(p, fail)), read_array])
def test_a_pipe_and_a_device_in_the_place_of_a_file_are_refused(tmp_path, reader):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        with pytest.raises(InputError, match=f"{name}: is not a regular file"):
            reader(tmp_path / name)


def test_a_run_whose_files_are_pipes_is_read_as_one_without_files(tmp_path):
    (tmp_path / "rank0").mkdir()
    names = ("run.json", "incidents.jsonl", "rank0/status.json", "rank0/anomalies.jsonl", "rank0/scalars_0-9.csv")
    for name in names:
        os.mkfifo(tmp_path / name)
    problems = []
    run = read_run(tmp_path, lambda *problem: problems.append(problem))
    assert (run.settings, run.ranks, run.incidents) == ({}, {0: {}}, ())
    assert {path.name for path, _, _ in problems} == {"run.json", "incidents.jsonl", "status.json"}
    assert anomalies_since(tmp_path / "rank0", 0, 9) == ([], 0)
    assert last_anomalies(tmp_path / "rank0") == []
    assert last_scalars(tmp_path / "rank0") == {}


def test_a_line_that_never_ends_is_named_and_the_next_one_read(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": 1}\n"' + b"x" * (3 * MAX_LINE_BYTES) + b'"\n{"a": 2}\n[3]\n')
    problems = []
    assert list(read_lines(path, lambda *problem: problems.append(problem))) == [(1, {"a": 1}), (3, {"a": 2})]
    assert [(place, line) for place, line, _ in problems] == [(path, 2), (path, 4)]


def test_a_file_of_a_gigabyte_without_a_line_takes_little_memory(tmp_path):
    for name in ("incidents.jsonl", "run.json"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(1 << 30)
    told = run_within(
        300,
        "from pathlib import Path; from trainsentry.exporters.run_reader import read_run",
        "print(read_run(Path(sys.argv[1]), lambda *p: print(p[0].name)).incidents)",
        tmp_path,
    )
    assert told.split() == ["incidents.jsonl", "run.json", "()"]


@pytest.mark.parametrize("value", [[], 3, "x", None, 10**400, True, {"step": "x"}, {"step": []}, {"step": 10**30}])
def test_members_of_wrong_types_are_left_out(tmp_path, value):
    (tmp_path / "rank0").mkdir()
    wrong = {"suspects": value, "actions": value, "id": value, "score": value, "first_seen": value, "severity": value}
    (tmp_path / "incidents.jsonl").write_text(json.dumps(wrong) + "\n" + json.dumps(value) + "\n")
    status = {"step": value, "cost": value, "gaps": value, "failures": value, "updated": value, "state": value}
    (tmp_path / "rank0" / "status.json").write_text(json.dumps(status))
    (tmp_path / "run.json").write_text(json.dumps({"start_time": value, "hosts": value, "versions": value}))
    line = {"step": value, "name": value, "quantity": value, "score": value}
    (tmp_path / "rank0" / "anomalies.jsonl").write_text(json.dumps(line) + "\n")
    run = read_run(tmp_path)
    assert run.is_over in {True, False}
    assert all(isinstance(i.get("suspects", []), list) and isinstance(i.get("id", 0), int) for i in run.incidents)
    assert all(isinstance(s.get("step", 0), int) and isinstance(s.get("cost", {}), dict) for s in run.ranks.values())
    assert anomalies_since(tmp_path / "rank0", 0, 9) == ([], 0)


def test_only_what_is_named_and_right_is_taken_of_an_object():
    kinds = {"n": whole, "x": number, "s": sizes, "t": objects({"a": text}, frozenset({"a"})), "m": statistic}
    given = {"n": True, "x": 2**64, "s": [1, -1], "t": [{"a": "b", "c": 1}, {"a": 2}, 3], "m": "NaN", "z": 1}
    found = checked(given, kinds)
    assert found.keys() == {"x", "t", "m"}
    assert (found["x"], found["t"]) == (2.0**64, [{"a": "b"}])


def test_members_that_are_whole_are_read_of_a_torn_text_and_no_further_down():
    assert complete_members('{"a": 1, "b": {"c": {"d": 1}, "e": {"f": 2', 2) == {"a": 1, "b": {"c": {"d": 1}}}
    with pytest.raises(InputError):
        complete_members("[1, 2", 2)
    with pytest.raises(InputError):
        complete_members('{"a": ' * 50_000, 2)


def test_an_array_that_says_it_has_terabytes_is_refused_before_any_are_taken(tmp_path):
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,), }"
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + b"\0" * 64)
    with pytest.raises(InputError, match="claims 8000000000000 bytes but has 64"):
        read_array(tmp_path / "a.npy")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x93NUMPY\x01\x00\x10\x00" + b"(" * 16, b"x" * 99])
def test_what_is_no_array_is_one_error(tmp_path, content):
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(InputError, match=str(Path("a.npy"))):
        read_array(tmp_path / "a.npy")
