"""An exporter that is registered from outside the package is configured, checked and run like those inside."""

import json
import sys
from pathlib import Path

import pandas as pd
import pytest
from tiny_models import train
from watched import STEPS, bare, errors, gaps, make, rows, status

from trainsentry import ConfigError, MonitorConfig
from trainsentry.exporters import registry
from trainsentry.exporters.registry import register_exporter
from trainsentry.monitor.config.files import load_config
from trainsentry.monitor.config.schema import config_model


@pytest.fixture(autouse=True)
def toys(monkeypatch):
    """Make `toy_exporter` importable, as a module of the user's is, and forget what a test registers."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "helpers"))
    monkeypatch.setattr(registry, "_registered", {})


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def test_a_toy_exporter_writes_its_file_in_the_recorder_process(out):
    register_exporter("toy_exporter:TOY")
    model, optimizer, monitor = make(out, export={"toy": {"file": "largest", "every": 2}})
    with monitor:
        assert monitor._loop.link.mode == "process"
        assert train(model, optimizer, STEPS, monitor).losses == bare()
    lines = [json.loads(line) for line in (out / "rank0" / "largest.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(0, STEPS, 2))
    tables = [pd.read_csv(path) for path in (out / "rank0").glob("*_0-999.csv") if "scalars" not in path.name]
    norms = pd.concat(tables).groupby("step")["norm"].max()
    assert [line["norm"] for line in lines] == norms[::2].tolist()
    assert status(out)["exporters"] == {"csv": "writing", "toy": "writing", "journal": "writing"}
    assert gaps(out) == []
    assert json.loads((out / "run.json").read_text())["configuration"]["export"]["toy"] == {
        "file": "largest",
        "every": 2,
    }


def test_it_is_off_unless_the_configuration_asks_for_it(out):
    register_exporter("toy_exporter:TOY")
    model, optimizer, monitor = make(out)
    with monitor:
        train(model, optimizer, 3, monitor)
    assert not list(out.rglob("toy*"))


def test_its_block_is_validated_with_the_others():
    with pytest.raises(ConfigError, match=r"export\.toy: unknown key"):
        load_config({"export": {"toy": True}})
    register_exporter("toy_exporter:TOY")
    assert load_config({"export": {"toy": True}}).export.toy.file == "toy"
    assert load_config({"export": {"toy": False}}).export.toy is None
    assert load_config({"export": False}).export.toy is None
    assert isinstance(load_config({}), MonitorConfig)
    with pytest.raises(ConfigError, match=r"export\.toy\.every: got 0: .*greater than or equal to 1"):
        load_config({"export": {"toy": {"every": 0}}})
    with pytest.raises(ConfigError, match=r"export\.toy\.evry: unknown key.*'every'; allowed: file, every"):
        load_config({"export": {"toy": {"evry": 2}}})
    with pytest.raises(ConfigError, match=r"export\.toi: unknown key.*'toy'"):
        load_config({"export": {"toi": True}})
    schema = config_model().model_json_schema()
    assert schema["$defs"]["Export"]["properties"]["toy"]["anyOf"][1] == {"$ref": "#/$defs/Toy"}
    assert schema["$defs"]["Toy"]["properties"]["every"]["minimum"] == 1


def test_nothing_registered_leaves_the_configuration_as_it_is():
    assert config_model() is MonitorConfig
    register_exporter("toy_exporter:TOY")
    assert "toy" not in MonitorConfig().model_dump()["export"]


def test_one_that_cannot_be_made_costs_itself_and_no_other(out, caplog):
    register_exporter("toy_exporter:BROKEN")
    model, optimizer, monitor = make(out, export={"broken": True})
    with monitor:
        assert train(model, optimizer, STEPS, monitor).losses == bare()
    assert rows(out) == dict.fromkeys(range(STEPS), 4)
    assert status(out)["exporters"]["broken"] == "RuntimeError: this toy is broken"
    assert gaps(out) == [("broken", 0, STEPS - 1)]
    assert monitor._loop.link.lost_recorders == []
    assert any("this toy is broken" in r.getMessage() for r in errors(caplog))


def test_one_that_the_recorder_cannot_import_costs_itself_and_no_other(out, tmp_path, monkeypatch):
    module = tmp_path / "vanishing_exporter.py"
    module.write_text("from toy_exporter import TOY\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    register_exporter("vanishing_exporter:TOY")
    module.unlink()
    model, optimizer, monitor = make(out, export={"toy": True})
    with monitor:
        train(model, optimizer, STEPS, monitor)
    sys.modules.pop("vanishing_exporter")
    assert rows(out) == dict.fromkeys(range(STEPS), 4)
    assert "vanishing_exporter" in status(out)["exporters"]["toy"]
    assert gaps(out) == [("toy", 0, STEPS - 1)]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_module:TOY", "no_such_module"),
        ("toy_exporter:NOTHING", "NOTHING"),
        ("toy_exporter:ToyWriter", "is a type"),
        ("toy_exporter", "allowed: module:name of an ExporterEntry"),
        ("__main__:TOY", "the recorder runs another __main__"),
        ("toy_exporter:TAKEN", "the key 'csv' is taken by trainsentry.exporters.csv.exporter:CSV"),
        ("toy_exporter:SETTING", "the key 'max_wait' is taken"),
        ("toy_exporter:DEMANDING", "'file' has no default; allowed: a default for every field"),
        ("toy_exporter:NO_DATACLASS", "allowed: a frozen dataclass"),
    ],
)
def test_a_name_that_cannot_serve_is_refused_when_it_is_registered(name, said):
    with pytest.raises(ValueError, match="allowed") as error:
        register_exporter(name)
    assert said in str(error.value)
    assert registry.table() == registry.EXPORTERS


def test_registering_twice_is_registering_once():
    register_exporter("toy_exporter:TOY")
    register_exporter("toy_exporter:TOY")
    assert registry.table() == {**registry.EXPORTERS, "toy": "toy_exporter:TOY"}


def test_a_package_that_it_needs_and_that_is_missing_is_an_error_before_the_first_step(out):
    register_exporter("toy_exporter:LACKING")
    with pytest.raises(ConfigError, match=r"export\.lacking: pip install no-such-package"):
        make(out, export={"lacking": True})
