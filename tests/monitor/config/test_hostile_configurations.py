"""Configuration files of any content end in one error that names the file, and take little time and memory."""

import os

import pytest
from limited_memory import run_within

from trainsentry.monitor.config.files import load_config
from trainsentry.monitor.debugger.debugger_config import load_debugger_config
from trainsentry.monitor.errors import ConfigError

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)
)


def load(path):
    for read in (load_config, lambda p: load_debugger_config(str(p), {"dump_path": str(p.parent / "dump")})):
        with pytest.raises(ConfigError) as raised:
            read(path)
        assert path.name in str(raised.value) or "task" in str(raised.value)
        assert len(str(raised.value)) < 4000


@pytest.mark.parametrize(
    ("suffix", "content"),
    [
        ("json", "[" * 100_000),
        ("json", '{"a": ' * 900 + "1" + "}" * 900),
        ("json", '{"output_dir": ' + "9" * 5000 + "}"),
        ("yaml", "[" * 5000),
        ("yaml", LAUGHS),
        ("yaml", "? [a, b]\n: c\n"),
        ("yaml", "1: 2\n"),
        ("toml", "a = " + "[" * 100_000),
        ("json", '{"task": [], "level": []}'),
        ("json", '{"": 1}'),
        ("json", '{"not a name": 1}'),
        ("json", '{"rank": "' + "x" * 100_000 + '", "ranks": "' + "x" * 100_000 + '"}'),
    ],
)
def test_odd_content_is_one_error(tmp_path, suffix, content):
    path = tmp_path / f"monitor.{suffix}"
    path.write_text(content)
    load(path)


def test_pipes_devices_and_large_files_are_one_error(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")
    with (tmp_path / "large.toml").open("wb") as file:
        file.truncate(3 << 30)
    for name in ("pipe.json", "zero.yaml", "large.toml"):
        load(tmp_path / name)


def test_a_range_of_steps_beyond_all_runs_is_one_error_and_takes_no_memory(tmp_path):
    (tmp_path / "a.json").write_text('{"dump_path": "out", "step": ["0-99999999999"]}')
    told = run_within(
        300,
        "from trainsentry.monitor.debugger.debugger_config import load_debugger_config\n"
        "from trainsentry.monitor.errors import ConfigError",
        "try: load_debugger_config(sys.argv[1], {})\nexcept ConfigError as error: print(error)",
        tmp_path / "a.json",
    )
    assert "at most 1000000 steps" in told


def test_a_folder_with_a_name_that_cannot_be_is_one_error(tmp_path):
    with pytest.raises(ConfigError, match="dump_path"):
        load_debugger_config(None, {"dump_path": "a\0b"})
