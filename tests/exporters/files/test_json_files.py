"""JSON files are whole or old; JSON lines survive a torn end."""

import json

from trainsentry.exporters.files.foreign_files import read_lines
from trainsentry.exporters.files.json_files import append_lines, replace_json, write_run


def test_a_torn_line_is_cut_and_bad_lines_are_named(tmp_path):
    path = tmp_path / "x.jsonl"
    append_lines(path, [{"a": 1}])
    with path.open("a") as file:
        file.write('{"a": 2')
    append_lines(path, [{"a": 3}])
    with path.open("a") as file:
        file.write("oops\n[1]\n")
    problems = []
    assert list(read_lines(path, lambda p, n, m: problems.append(n))) == [(1, {"a": 1}), (2, {"a": 3})]
    assert problems == [3, 4]


def test_replacing_leaves_no_temporary_file(tmp_path):
    path = tmp_path / "deep" / "status.json"
    replace_json(path, {"a": 1})
    replace_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}
    assert [p.name for p in path.parent.iterdir()] == ["status.json"]


def test_run_json_is_written_once_and_keeps_the_starts(tmp_path):
    start = {"start_time": 1.0, "start_step": 0, "restart": 0, "world_size": 1}
    write_run(tmp_path / "run.json", start)
    write_run(tmp_path / "run.json", {**start, "start_step": 50, "restart": 1, "world_size": 2})
    run = json.loads((tmp_path / "run.json").read_text())
    assert (run["schema_version"], run["world_size"]) == (1, 1)
    assert [s["start_step"] for s in run["starts"]] == [0, 50]
