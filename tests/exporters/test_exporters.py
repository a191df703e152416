"""Every entry of the table of exporters keeps the contract of `ExporterEntry`."""

import subprocess
import sys
from dataclasses import fields, is_dataclass, replace
from typing import get_args

import pytest
from step_records import Records

from trainsentry import ConfigError, MonitorConfig
from trainsentry.exporters import registry
from trainsentry.exporters.exporter import ExporterEntry, ExportPlace, Moment, Needed, Place
from trainsentry.exporters.registry import EXPORTERS, load_entry, make_exporter, missing_package
from trainsentry.monitor.config.files import load_config
from trainsentry.monitor.trainer.wiring import check_installed

ENTRIES = [load_entry(name) for name in EXPORTERS.values()]
NEEDS = [(entry, needed) for entry in ENTRIES for needed in entry.needs]
BASE = ("torch", "pandas", "tensorboard", "pydantic")


@pytest.fixture(params=ENTRIES, ids=list(EXPORTERS))
def entry(request):
    return request.param


def block(entry: ExporterEntry):
    return None if entry.block is None else entry.block()


def test_the_key_of_an_entry_is_its_key_in_the_table():
    assert [entry.key for entry in ENTRIES] == list(EXPORTERS)


def test_a_block_is_a_frozen_dataclass_with_defaults(entry):
    if entry.block is not None:
        assert is_dataclass(entry.block)
        assert entry.block.__doc__
        with pytest.raises(AttributeError):
            setattr(entry.block(), fields(entry.block)[0].name, None)


def test_moment_and_places_are_known(entry):
    assert entry.at in get_args(Moment)
    assert set(entry.places) <= set(get_args(Place))


def test_the_configuration_has_its_block_with_the_same_defaults(entry):
    default = getattr(MonitorConfig().export, entry.key)
    assert bool(default) == entry.on
    switched_on = getattr(load_config({"export": {entry.key: True}}).export, entry.key)
    if entry.block is None:
        assert switched_on is True
    else:
        assert entry.block(**switched_on.model_dump(mode="json")) == entry.block()
    assert not getattr(load_config({"export": {entry.key: False}}).export, entry.key)


def test_what_the_configuration_switches_on_comes_to_the_recorder_as_typed_blocks():
    config = load_config({"export": {"tensorboard": {"raw": ["a"], "max_raw_tags": -1}, "report": False}})
    found = list(registry.switched_on(config.model_dump(mode="json")["export"], EXPORTERS))
    assert [entry.key for entry, _ in found] == ["csv", "tensorboard"]
    assert found[1][1] == found[1][0].block(["a"], -1, 100)


def test_it_is_made_for_a_place_and_does_what_its_moment_asks(entry, tmp_path, monkeypatch):
    for needed in entry.needs:
        if needed.setting is None:
            pytest.importorskip(needed.module)
    monkeypatch.setenv("TRAINSENTRY_REPORT", "0")
    records = Records()
    place = ExportPlace(tmp_path, tmp_path / "rank0", 0, records.table, ("min", "max", "norm"))
    made = entry.make(block(entry), place)
    methods = {"record": ("write", "close"), "status": ("begin", "renew"), "incident": ("__call__",)}
    assert all(callable(getattr(made, name)) for name in methods.get(entry.at, ("__call__",)))
    if entry.at == "record" and entry.patient:
        made.write(records.step(0, {("fc.weight", "gradient"): 1.0}))
        made.close()
        assert any(path.is_file() for path in tmp_path.rglob("*"))


def test_one_that_cannot_be_made_raises_its_reason_wherever_it_is_used(entry, tmp_path):
    def fails(*_):
        raise OSError("no device")

    place = ExportPlace(tmp_path, tmp_path / "rank0", 0, Records().table, ())
    made = make_exporter(replace(entry, make=fails), block(entry), place)
    for use in (lambda: made.write(None), made.begin, lambda: made.renew(now=True), lambda: made(1)):
        with pytest.raises(OSError, match="no device"):
            use()
    made.close()


@pytest.mark.parametrize(("entry", "needed"), NEEDS, ids=[f"{e.key}-{n.module}" for e, n in NEEDS])
def test_a_package_that_is_missing_is_named_with_the_way_to_install_it(entry, needed, monkeypatch):
    key = f"export.{entry.key}" if needed.setting is None else f"export.{entry.key}.{needed.setting}"
    settings = True if needed.setting is None else {needed.setting: needed.value}
    find = registry.find_spec
    monkeypatch.setattr(registry, "find_spec", lambda name: None if name == needed.module else find(name))
    with pytest.raises(ConfigError, match="allowed: pip install") as error:
        check_installed(load_config({"export": {entry.key: settings}}))
    assert str(error.value).startswith(f"{key}: ")
    check_installed(load_config({}))


def test_no_entry_imports_what_it_needs_before_it_runs():
    heavy = (*BASE, *(needed.module for _, needed in NEEDS))
    modules = ", ".join(name.partition(":")[0] for name in EXPORTERS.values())
    code = f"import sys, {modules}; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_package_inside_one_that_is_missing_is_missing():
    entry = ExporterEntry("toy", lambda *_: None, needs=(Needed("not_there.inside", "toy is missing"),))
    assert missing_package(entry, None) == "export.toy: toy is missing"
