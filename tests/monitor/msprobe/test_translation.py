"""Configurations of msprobe's monitors, recognised, named and converted."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import trainsentry
from trainsentry.monitor.cli.app import app
from trainsentry.monitor.config.files import load_config
from trainsentry.monitor.config.msprobe_keys import FIRST_KEYS, msprobe_generation
from trainsentry.monitor.msprobe.first_keys import FirstConfig
from trainsentry.monitor.msprobe.translation import translate

DATA = Path(__file__).parents[2] / "data" / "msprobe_files"


def convert(*args):
    return CliRunner().invoke(app, ["config", "convert", *map(str, args)])


@pytest.mark.parametrize("name", ["first.json", "second.json"])
def test_both_generations_become_a_valid_configuration(name, tmp_path):
    to = tmp_path / "monitor.json"
    done = convert(DATA / name, to)
    assert done.exit_code == 0, done.output
    config = load_config(to)
    assert config.collect.gradients.before_reduction
    assert config.collect.parameters.after_update
    assert config.collect.updates is None
    assert "changes: " in done.stderr


def test_msprobes_files_are_kept_on_request(tmp_path):
    done = convert("--keep-files", DATA / "first.json")
    config = json.loads(done.stdout)
    assert config["export"]["csv"] is False
    assert config["export"]["msprobe"]["ndigits"] == 16


def test_lines_of_code_become_call_sites():
    first = {"cc_distribution": {"enable": True, "cc_codeline": [r"train\.py\[23\]", "sync"]}}
    config = translate(first, "here").config
    assert config["collect"]["communication"]["call_sites"] == ["*train.py:23", "*sync*"]


@pytest.mark.parametrize(("start", "times", "stop"), [(0, 3, 21), (15, 1, 21), (20, 2, 31)])
def test_the_number_of_collections_becomes_the_last_step(start, times, stop):
    first = {"wg_distribution": True, "start_step": start, "step_interval": 10, "collect_times": times}
    assert translate(first, "here").config["stop_step"] == stop


def test_what_has_no_place_is_said():
    first = {"stack_info": True, "recording_l2_features": True, "xy_distributon": True, "wg_distribution": True}
    said = "\n".join(translate(first, "here").differences)
    assert "stack_info: no stack_info.csv" in said
    assert "interpretability" in said
    assert "did you mean 'xy_distribution'" in said


@pytest.mark.parametrize(("name", "generation"), [("first.json", "V1"), ("second.json", "V2")])
def test_the_monitor_names_a_configuration_of_msprobe(name, generation):
    with pytest.raises(trainsentry.ConfigError, match=f"msprobe's monitor, {generation}.*config convert") as caught:
        trainsentry.TrainMonitor(DATA / name)
    assert "unknown key" not in str(caught.value)


def test_a_typing_error_in_our_own_configuration_stays_one():
    with pytest.raises(trainsentry.ConfigError, match="unknown key"):
        trainsentry.TrainMonitor({"colect": {}})


def test_what_is_no_configuration_of_msprobe_is_refused(tmp_path):
    path = tmp_path / "c.json"
    path.write_text('{"task": "statistics", "dump_path": "x"}')
    done = convert(path)
    assert done.exit_code == 2
    assert "not a configuration of msprobe's monitor" in done.stderr


def test_the_keys_that_are_recognised_are_the_keys_that_are_read():
    assert set(FirstConfig.model_fields) - {"start_step", "eps"} == FIRST_KEYS
    assert msprobe_generation({"eps": 1e-8, "start_step": 3}) is None
