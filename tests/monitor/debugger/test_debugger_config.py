"""An error in a debugger's configuration names key, value and allowed values; both generations are read."""

import json
import os
import stat

import pytest

pytest.importorskip("torch", reason="the debugger finds out which framework is there")

from trainsentry import ConfigError, PrecisionDebugger
from trainsentry.monitor.debugger.debugger_config import load_debugger_config


def load(tmp_path, **config):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"dump_path": str(tmp_path / "dump"), **config}))
    return load_debugger_config(str(path), {})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"task": "statistic"}, "task: 'statistic'; allowed: statistics, tensor"),
        ({"task": "run_ut", "level": "mix"}, "level: 'mix' with task 'run_ut'; allowed: L1, as operations are checked"),
        ({"task": "run_ut", "run_ut": {"white_list": "linear"}}, "run_ut.white_list: got 'linear'"),
        (
            {"task": "run_ut", "run_ut": {"white_list": ["add"], "black_list": ["mm", "add"]}},
            r"white_list \['add'\] lies within black_list .*; allowed: a white_list with other names too",
        ),
        ({"task": "run_ut", "run_ut": {"rule": "strict"}}, "rule: 'strict'; allowed: standards, run_ut, mindspore"),
        ({"task": "run_ut", "run_ut": {"max_bytes": "4 gigs"}}, "max_bytes: .*allowed: a number of bytes"),
        ({"task": "run_ut", "run_ut": {"error_data_path": "/dev/null/x"}}, "run_ut.error_data_path: .* cannot be cre"),
        ({"level": "L3"}, "level: 'L3'; allowed: L0, L1, mix, debug"),
        ({"level": "debug", "task": "structure"}, "level: 'debug'|task 'structure' is read as 'mix'"),
        ({"level": "debug", "task": "overflow_check"}, "level: 'debug' with task 'overflow_check'; allowed: task"),
        ({"rank": ["x"]}, "'x'; allowed: numbers from 0 on"),
        ({"step": ["5-3"]}, "'5-3'; allowed: numbers from 0 on"),
        ({"step": [-1]}, "-1; allowed: numbers from 0 on"),
        ({"enable_dataloader": True}, r"enable_dataloader: True; allowed: false, with start\(\)"),
        ({"async_dump": True, "statistics": {"summary_mode": "md5"}}, "allowed: summary_mode statistics"),
        ({"statistics": {"scope": ["a", "b"], "list": ["c"]}}, "are both given; allowed: one of them"),
        ({"statistics": {"scope": ["Functional.linear.0.forward"] * 3}}, "allowed: two full names"),
        (
            {"task": "tensor", "tensor": {"backward_input": "x.pt"}},
            r"tensor.backward_input: \['x.pt'\] at level 'L1'; allowed: \[\]",
        ),
        (
            {"task": "tensor", "tensor": {"list": ["name-regex(MatMul.*)"]}},
            r"tensor.list: \['name-regex.* at level 'L1'; allowed: names of calls, or level L2",
        ),
        ({"task": "tensor", "tensor": {"file_format": "bin"}}, "file_format: 'bin' at level 'L1'; allowed: npy"),
        ({"task": "tensor", "tensor": {"file_format": "pt"}}, "file_format: got 'pt'"),
        ({"task": "overflow_check", "overflow_check": {"check_mode": "aicore"}}, "check_mode: 'aicore' at level 'L1'"),
        ({"statistics": {"scope": ["linear", "gelu"]}}, "allowed: full names such as"),
        ({"statistics": {"data_mode": ["forwards"]}}, "'forwards'; allowed: some of all, forward"),
        ({"statistics": {"data_mode": ["all", "input"]}}, "alone, or some of the others"),
        ({"statistics": {"lists": []}}, "unknown key; the closest known one is 'list'"),
        ({"task": "overflow_check", "overflow_check": {"overflow_nums": -2}}, "overflow_nums: got -2"),
        ({"task": "grad_probe", "grad_probe": {"bounds": [1, 0]}}, "allowed: ascending numbers"),
        ({"dumppath": "x"}, "unknown key; the closest known one is 'dump_path'"),
    ],
)
def test_a_mistake_is_named(tmp_path, config, message):
    if "structure" in config.values():
        loaded, warnings = load(tmp_path, **config)
        assert loaded.level == "mix"
        assert message.partition("|")[2] in warnings[0]
        return
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, **config)


@pytest.mark.parametrize(
    ("key", "name", "hint"),
    [
        ("white_list", "liner", "; the closest known one is 'linear'"),
        ("black_list", "Functional.liner", "; the closest known one is 'Functional.linear'"),
        ("white_list", "Tensor.0123456789.3", ""),
    ],
)
def test_an_operation_that_torch_does_not_have_is_named(tmp_path, key, name, hint):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"task": "run_ut", "dump_path": str(tmp_path), "run_ut": {key: [name]}}))
    expected = f"run_ut.{key}: {name!r} is no operation of torch{hint}; allowed: operations such as linear"
    with pytest.raises(ConfigError, match=expected):
        PrecisionDebugger(str(path), framework="torch")


def test_names_of_single_calls_and_of_other_packages_are_taken(tmp_path):
    path = tmp_path / "config.json"
    names = ["linear", "Tensor.__add__.12", "NPU.npu_rms_norm", "Aten.mm.0", "mine.own"]
    settings = {"white_list": names, "is_online": True, "host": "10.0.0.1"}
    path.write_text(json.dumps({"task": "acc_check", "dump_path": str(tmp_path), "acc_check": settings}))
    config, warnings = load_debugger_config(str(path), {})
    assert (config.task, config.run_ut.white_list) == ("run_ut", names)
    assert warnings[1:] == ["run_ut.is_online: is not used", "run_ut.host: is not used"]
    PrecisionDebugger(str(path), framework="torch")


def test_a_folder_that_cannot_be_written(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match=r"dump_path: .* cannot be created"):
        load(tmp_path, dump_path=str(file))
    nowhere = tmp_path / "without.json"
    nowhere.write_text("{}")
    with pytest.raises(ConfigError, match="dump_path: missing; allowed"):
        load_debugger_config(str(nowhere), {})
    if os.geteuid() != 0:
        closed = tmp_path / "closed"
        closed.mkdir()
        closed.chmod(stat.S_IRUSR)
        with pytest.raises(ConfigError, match="is not writable"):
            load(tmp_path, dump_path=str(closed))


def test_both_generations_are_read(tmp_path):
    older = {
        "task": "overflow_check",
        "rank": [],
        "step": ["0-1", 4],
        "level": "L1",
        "enable_dataloader": False,
        "acl_config": "",
        "tensor": {"scope": [], "list": [], "data_mode": ["all"], "backward_input": [], "file_format": "npy"},
        "overflow_check": {"overflow_nums": 3},
        "run_ut": {"white_list": [], "black_list": [], "error_data_path": "./"},
        "grad_probe": {"grad_level": "L1", "param_list": [], "bounds": [-1, 0, 1]},
        "free_benchmark": {"scope": [], "list": [], "fuzz_device": "npu", "pert_mode": "improve_precision"},
    }
    config, warnings = load(tmp_path, **older)
    assert (config.task, config.step, config.overflow_check.overflow_nums) == ("overflow_check", [0, 1, 4], 3)
    assert sorted(w.partition(":")[0] for w in warnings) == [
        "free_benchmark",
        "grad_probe",
        "run_ut",
    ]
    newer = {
        "task": "statistics",
        "level": "mix",
        "risk_level": "ALL",
        "extra_info": True,
        "precision": "low",
        "statistics": {"scope": [], "list": [], "tensor_list": [], "data_mode": ["all"], "summary_mode": "statistics"},
    }
    config, warnings = load(tmp_path, **newer)
    assert (config.risk_level, warnings) == ("ALL", [])
    config, warnings = load(tmp_path, task="nan_check", nan_check={"overflow_nums": 2})
    assert (config.task, config.overflow_check.overflow_nums) == ("overflow_check", 2)


def test_seed_and_is_deterministic_seed_everything(tmp_path):
    import random

    import numpy as np
    import torch

    def draws():
        return random.random(), float(np.random.rand()), torch.rand(1).item()

    PrecisionDebugger(str(_file(tmp_path, seed=7))).close()
    first = draws()
    PrecisionDebugger(str(_file(tmp_path, seed=7))).close()
    assert draws() == first
    assert os.environ["PYTHONHASHSEED"] == "7"


def _file(tmp_path, **config):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"dump_path": str(tmp_path / "dump"), **config}))
    return path


def test_ranks_that_do_not_exist_and_steps_that_never_come(tmp_path, caplog):
    debugger = PrecisionDebugger(str(_file(tmp_path, rank=[3])))
    import torch

    debugger.start()
    torch.ones(2) + 1
    debugger.stop()
    debugger.step()
    debugger.close()
    assert "rank: [3] do not exist and have no dump; there are 0 to 0" in caplog.text
    assert not list((tmp_path / "dump").iterdir())
    debugger = PrecisionDebugger(str(_file(tmp_path, step=[0, 9])))
    for _ in range(3):
        debugger.start()
        debugger.stop()
        debugger.step()
    debugger.close()
    assert "step: [9] never came; the last step was 2" in caplog.text


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda d: d.start("model"), TypeError, r"model: got str; allowed: torch.nn.Module"),
        (lambda d: d.start([]), TypeError, "got an empty list"),
        (lambda d: d.start(token_range=[0, 1]), ValueError, "no model"),
        (lambda d: d.start(_linear(), token_range=[2, 1]), ValueError, r"allowed: \[first, last\]"),
        (lambda d: d.save(1, ""), ValueError, "allowed: a non-empty text"),
        (lambda d: d.set_init_step(-1), ValueError, "allowed: a whole number"),
        (lambda d: d.module_dump("m", "n"), TypeError, "model: got str"),
        (lambda d: d.monitor(_linear()), ValueError, "allowed: task grad_probe"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path, call, error, message):
    debugger = PrecisionDebugger(task="statistics", dump_path=str(tmp_path))
    with pytest.raises(error, match=message):
        call(debugger)


def test_without_a_file_the_default_configuration_holds(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    debugger = PrecisionDebugger()
    assert f"the debugger writes to {tmp_path / 'dump'}" in caplog.text
    import torch

    debugger.start()
    torch.ones(2) + 1
    debugger.stop()
    debugger.step()
    written = json.loads((tmp_path / "dump" / "step0" / "rank0" / "dump.json").read_text())
    assert (written["task"], written["level"], list(written["data"])) == (
        "statistics",
        "L1",
        ["Tensor.__add__.0.forward"],
    )


def _linear():
    from torch import nn

    return nn.Linear(1, 1)


def test_modules_cannot_be_dumped_without_a_model(tmp_path):
    debugger = PrecisionDebugger(task="statistics", level="mix", dump_path=str(tmp_path))
    with pytest.raises(ValueError, match="at level 'mix'; allowed: the model"):
        debugger.start()


def test_a_disk_that_fills_up_is_named_once_and_training_goes_on(tmp_path, monkeypatch, caplog):
    from debugged import Tower, make, train

    from trainsentry.exporters.dumps import step_dump

    def full(*_):
        raise OSError(28, "No space left on device")

    debugger = PrecisionDebugger(task="statistics", level="L0", dump_path=str(tmp_path))
    bare = train(make(Tower), 3)
    monkeypatch.setattr(step_dump.os, "pwrite", full)
    with_it = train(make(Tower), 3, debugger)
    assert with_it[0] == bare[0]
    assert caplog.text.count("No space left on device") == 1
