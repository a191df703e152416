"""An error in the configuration names the key, the value and the allowed values."""

import json

import pytest

from trainsentry import ConfigError, MonitorConfig
from trainsentry.monitor.config.files import load_config

DEFAULTS = {
    "output_dir": "monitor_output",
    "ranks": "all",
    "start_step": 0,
    "stop_step": None,
    "statistics": ["min", "max", "mean", "norm", "nans", "infs", "zeros"],
    "eps": 0.0,
    "collect": {
        "gradients": {"every": 1, "targets": ["*"], "before_reduction": False, "per_micro_step": False},
        "parameters": {"every": 10, "targets": ["*"]},
        "optimizer_state": {"every": 10, "targets": ["*"]},
        "updates": {"every": 10, "targets": ["*"]},
        "activations": {"every": 10, "targets": ["*"], "forward": True, "backward": True},
        "communication": {"every": 10},
    },
    "export": {"csv": {"steps_per_file": 1000}, "tensorboard": False, "max_wait": 5.0},
    "detect": True,
    "overflow_check": {"overflow_nums": -1},
    "on_incident": {
        "dump": {"steps": 1, "max_bytes": "1GiB", "cooldown_steps": 100, "same_step": "auto"},
        "overflow_check": True,
        "sample_every_step_for": 20,
        "stop": False,
    },
    "disk_quota": "20GiB",
    "overhead_budget": None,
    "strict": False,
}


def test_the_documented_defaults_are_the_defaults():
    assert load_config(DEFAULTS) == MonitorConfig() == load_config(None)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.json", '{"collect": {"gradients": {"every": 5}}}'),
        ("c.yaml", "collect:\n  gradients:\n    every: 5\n"),
        ("c.toml", "[collect.gradients]\nevery = 5\n"),
    ],
)
def test_files_of_each_kind_are_read(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    assert load_config(path).collect.gradients.every == 5
    assert load_config(str(path)) == load_config({"collect": {"gradients": {"every": 5}}})


def test_every_block_may_be_true_or_false():
    config = load_config(
        {
            "collect": {"gradients": False, "updates": True},
            "export": {"csv": False, "tensorboard": True},
            "detect": False,
        }
    )
    assert config.collect.gradients is None
    assert config.collect.updates.every == 10
    assert (config.export.csv, config.detect) == (None, None)
    assert config.export.tensorboard is not None


def test_blocks_of_blocks_may_be_true_or_false_too():
    config = load_config({"collect": False, "export": False})
    assert not any(value for _, value in config.collect)
    assert (config.export.csv, config.export.tensorboard, config.export.max_wait) == (None, None, 5.0)
    assert load_config({"collect": True, "export": True}) == MonitorConfig()


def test_paths_and_tuples_are_taken(tmp_path):
    collect = {"gradients": {"targets": ("a",)}}
    config = load_config({"output_dir": tmp_path, "statistics": ("norm",), "collect": collect})
    assert config.output_dir == str(tmp_path)
    assert config.collect.gradients.targets == ["a"]


MISTAKES = [
    ({"colect": {}}, ["colect", "'collect'", "allowed"]),
    ({"on_incident": {"stop": "yes"}}, ["on_incident.stop", "'yes'", "allowed: true or false"]),
    ({"collect": {"gradients": {"every": "often"}}}, ["every", "'often'", "allowed: a whole number"]),
    ({"collect": {"gradients": {"every": 2.5}}}, ["every", "2.5", "allowed: a whole number"]),
    ({"detect": {"false_alarms_per_day": "few"}}, ["false_alarms_per_day", "'few'", "allowed: a number"]),
    ({"statistics": "norm"}, ["statistics", "'norm'", "allowed: a list"]),
    (
        {"export": {"csv": "no"}},
        ["export.csv", "'no'", "allowed: true, false or an object with some of the keys"],
    ),
    ({"collect": {"gradient": True}}, ["collect.gradient", "'gradients'"]),
    ({"collect": {"gradients": {"evry": 2}}}, ["collect.gradients.evry", "'every'"]),
    ({"collect": {"gradients": {"every": 0}}}, ["collect.gradients.every", "0", "greater than or equal to 1"]),
    ({"collect": {"gradients": {"every": "10"}}}, ["collect.gradients.every", "'10'", "whole number"]),
    ({"collect": {"parameters": {"targets": "*"}}}, ["collect.parameters.targets", "'*'", "list"]),
    ({"statistics": ["norm", "median"]}, ["statistics", "median", "min, max, mean"]),
    ({"overflow_check": {"overflow_nums": 0}}, ["overflow_check.overflow_nums", "0", "-1"]),
    ({"on_incident": {"dump": {"max_bytes": "1 parsec"}}}, ["on_incident.dump.max_bytes", "parsec", "GiB"]),
    ({"on_incident": {"dump": {"same_step": "sometimes"}}}, ["on_incident.dump.same_step", "sometimes", "auto"]),
    ({"ranks": ["first"]}, ["ranks", "first", "4-7"]),
    ({"ranks": [-1]}, ["ranks", "-1"]),
    ({"ranks": []}, ["ranks", "empty"]),
    ({"ranks": ["7-4"]}, ["ranks", "7-4"]),
    ({"start_step": 50, "stop_step": 10}, ["stop_step", "10", "50"]),
    ({"eps": -1.0}, ["eps", "-1.0"]),
    ({"overhead_budget": 0}, ["overhead_budget", "0"]),
    ({"overhead_budget": 1.5}, ["overhead_budget", "1.5"]),
    ({"ring_size": "1kB"}, ["ring_size", "1048576"]),
]


@pytest.mark.parametrize(("config", "said"), MISTAKES)
def test_a_mistake_names_key_value_and_what_is_allowed(config, said):
    with pytest.raises(ConfigError) as error:
        load_config(config)
    for part in said:
        assert part in str(error.value)


def test_several_mistakes_are_named_at_once():
    with pytest.raises(ConfigError) as error:
        load_config({"eps": "no", "strict": 3})
    assert "eps" in str(error.value)
    assert "strict" in str(error.value)


@pytest.mark.parametrize(("name", "text"), [("c.json", "{"), ("c.yaml", "a: [1"), ("c.toml", "= 3"), ("c.json", "[1]")])
def test_malformed_files_are_named(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=str(path)):
        load_config(path)


def test_missing_files_unknown_suffixes_and_other_objects_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"missing\.json"):
        load_config(tmp_path / "missing.json")
    with pytest.raises(ConfigError, match=r"\.ini.*\.json"):
        load_config("config.ini")
    with pytest.raises(ConfigError, match="int"):
        load_config(3)


def test_the_schema_accepts_what_the_configuration_accepts():
    schema = MonitorConfig.model_json_schema()
    gradients = schema["$defs"]["Collect"]["properties"]["gradients"]
    assert {"type": "boolean"} in gradients["anyOf"]
    assert set(schema["properties"]) >= set(DEFAULTS)
    json.dumps(schema)
