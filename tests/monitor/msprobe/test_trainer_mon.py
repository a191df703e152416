"""A script written for msprobe's monitor runs after its import was changed, and writes what msprobe wrote."""

import json
import os
from pathlib import Path

import pandas as pd
import pytest
import torch
from forked_scripts import Script, start_forked
from golden_gpt import GoldenGpt, train_golden
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import trainsentry
from trainsentry.monitor.errors import ConfigError

DATA = Path(__file__).parents[2] / "data" / "msprobe_files"
GOLDEN = DATA / "first"
ALL = json.loads((DATA / "first.json").read_text())


@pytest.fixture
def written(out, tmp_path, monkeypatch):
    """Train with a configuration (`ALL` and changes); return the monitor, its directory, and what training raised."""
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(out))
    opened = []

    def run(steps=2, arrange=lambda monitor, model, optimizer: monitor.set_monitor(model, optimizer), **changes):
        path = tmp_path / "monitor_config.json"
        path.write_text(json.dumps({**ALL, **changes}))
        torch.manual_seed(0)
        model = GoldenGpt()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        monitor = trainsentry.TrainerMon(str(path), params_have_main_grad=False)
        opened.append(monitor)
        arrange(monitor, model, optimizer)
        train_golden(model, optimizer, steps, lambda step: seen.append(monitor.generate_wgrad_metrics()))
        monitor.close()
        [directory] = out.glob("*-rank0-*")
        return directory

    seen = run.metrics = []
    run.out = out
    yield run
    for monitor in opened:
        monitor.close()


def names(path):
    """Return the names, shapes and dtypes in a table."""
    table = pd.read_csv(path, keep_default_na=False)
    return {tuple(row) for row in table[["vpp_stage", "name", "step", "shape", "dtype"]].itertuples(index=False)}


def test_the_files_have_msprobes_names_columns_and_rows(written):
    directory = written()
    assert {p.name for p in GOLDEN.iterdir()} == {p.name for p in directory.glob("*_1-1.csv")}
    for golden in GOLDEN.iterdir():
        ours = directory / golden.name
        assert ours.open().readline() == golden.open().readline(), golden.name
        without_tensor = {row for row in names(golden) if row[3] == "nan"}  # msprobe writes a row of NaN for no tensor
        assert names(ours) == names(golden) - without_tensor, golden.name


def test_the_numbers_are_those_of_the_tensors(written):
    weights = {}

    def arrange(monitor, model, optimizer):
        monitor.set_monitor(model, 1, optimizer)  # the order of the older documentation
        weights["param_origin"] = model.head.weight.detach().double()
        optimizer.register_step_post_hook(
            lambda *_: weights.setdefault("param_updated", model.head.weight.detach().double())
        )

    directory = written(steps=1, arrange=arrange)
    assert not torch.equal(*weights.values())
    for table, tensor in weights.items():
        [row] = pd.read_csv(directory / f"{table}_0-0.csv").query("name == 'head.weight'").to_dict("records")
        assert row["norm"] == pytest.approx(float(tensor.norm()), rel=1e-9), table
        assert row["max"] == pytest.approx(float(tensor.max()), rel=1e-9), table


def test_metrics_in_memory_are_the_gradients_that_the_parameters_hold(written):
    grads = []

    def arrange(monitor, model, optimizer):
        optimizer.register_step_pre_hook(lambda *_: grads.append(float(model.head.weight.grad.double().norm())))
        monitor.set_wrapped_optimizer(optimizer)
        monitor.monitor_gnorm_with_ad(model)

    written(arrange=arrange, steps=2)
    reduced = [found[0]["0:head.weight/rank0/post_grad"]["norm"].item() for found in written.metrics]
    unreduced = [found[1]["0:head.weight/rank0/acc_grad"]["norm"].item() for found in written.metrics]
    assert reduced == pytest.approx(grads, rel=1e-9)
    assert unreduced == pytest.approx(grads, rel=1e-9)


def test_format_api_writes_no_table_and_gives_activations_in_memory(out, tmp_path, monkeypatch):
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(out))
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**ALL, "format": "api", "ops": ["max", "shape"]}))
    model = GoldenGpt()
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = trainsentry.TrainerMon(str(path))
    monitor.set_monitor(model, optimizer, grad_acc_steps=1)
    found = []
    train_golden(model, optimizer, 1, lambda step: found.append(monitor.generate_xy_metrics()))
    monitor.close()
    [(activations, gradients)] = found
    assert activations["0:blocks.1.mlp.fc1.output:0/rank0/actv"]["shape"] == [2, 16, 128]
    assert "0:head.output:0/rank0/actv_grad" in gradients
    assert not list(out.glob("*-rank0-*"))


def test_reloading_switches_activations_on(out, tmp_path, monkeypatch):
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(out))
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"targets": {}, "wg_distribution": True}))
    model = GoldenGpt()
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = trainsentry.TrainerMon(str(path))
    monitor.set_monitor(model, optimizer)
    train_golden(model, optimizer, 4, lambda step: monitor.reload_xy(True) if step == 1 else None)
    monitor.close()
    assert sorted(p.name for p in out.glob("*-rank0-*/actv_[0-9]*")) == ["actv_2-2.csv", "actv_3-3.csv"]
    assert len(list(out.glob("*-rank0-*/grad_reduced_*"))) == 4


def test_targets_choose_modules_elements_and_parameters(written):
    directory = written(targets={"0:blocks.0.mlp.fc1": {"output": "tensor"}, "head": {}}, all_xy=False)
    modules = {row[1] for row in names(directory / "actv_1-1.csv")}
    assert modules == {"blocks.0.mlp.fc1.output", "head.input", "head.output"}
    parameters = {row[1] for row in names(directory / "grad_reduced_1-1.csv")}
    assert parameters == {"blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc1.bias", "head.weight"}


def test_digits_steps_per_file_interval_and_times(written):
    directory = written(
        steps=8, ndigits=2, step_count_per_record=4, start_step=2, step_interval=2, collect_times=2, ops=["max"]
    )
    tables = sorted(directory.glob("grad_reduced*"))
    assert [t.name for t in tables] == ["grad_reduced_0-3.csv", "grad_reduced_4-7.csv"]
    read = pd.concat(pd.read_csv(t) for t in tables)
    assert list(read) == ["vpp_stage", "name", "step", "max", "shape", "dtype"]
    assert sorted(set(read["step"])) == [2, 4]
    assert all(len(str(value).partition(".")[2]) <= 2 for value in read["max"])


def test_squashed_names_begin_at_the_norm(written):
    directory = written(squash_name=True, xy_distribution=False)
    assert "head.weight" in {row[1] for row in names(directory / "param_origin_0-0.csv")}


def test_the_direction_of_gradient_and_momentum_is_a_share(written):
    directory = written(mg_direction=True)
    table = pd.read_csv(directory / "other_1-1.csv")
    assert set(table["name"]) == {row[1] for row in names(directory / "exp_avg_1-1.csv")}
    assert table["mean"].between(0, 1).all()
    assert 0 < table["mean"].mean() < 1
    assert (table["norm"] == table["mean"]).all()


def test_curves_have_msprobes_tags(written):
    directory = written(format="tensorboard", ops=["norm"])
    events = EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()
    tags = events.Tags()["scalars"]
    assert {"0:head.input:0/rank0/actv_norm", "0:head.weight/rank0/post_grad_norm"} <= set(tags)
    assert [e.step for e in events.Scalars("0:head.weight/rank0/exp_avg_norm")] == [1]
    assert not list(directory.glob("*.csv"))


def test_appended_output_goes_on_in_the_old_directory(written):
    first = written()
    time = first.name.partition("-rank")[0]
    second = written(append_output=[time, time], steps=3)
    assert second == first
    assert (first / "grad_reduced_2-2.csv").exists()
    rows = len(pd.read_csv(first / "grad_reduced_1-1.csv"))
    assert rows == len(pd.read_csv(GOLDEN / "grad_reduced_1-1.csv")), "the same rows are not written twice"


def test_print_struct_writes_the_structure_and_ends_the_training(written):
    with pytest.raises(trainsentry.TrainingStopped, match="print_struct: the modules stand in"):
        written(print_struct=True)
    ours = json.loads((written.out / "module_struct" / "rank0" / "module_struct.json").read_text())
    golden = json.loads((DATA / "module_struct.json").read_text())
    assert {key: ours[key] for key in golden if key != "0:"} == {key: golden[key] for key in golden if key != "0:"}


def test_dynamic_on_begins_the_collection_and_collect_times_end_it(out, tmp_path, monkeypatch):
    monkeypatch.setattr("trainsentry.monitor.trainer.live_control.LOOK_SECONDS", 0.0)
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(out))
    monkeypatch.setenv("DYNAMIC_MONITOR", "True")
    path = tmp_path / "monitor_config.json"
    settings = {"targets": {}, "wg_distribution": True, "collect_times": 2}
    path.write_text(json.dumps({**settings, "dynamic_on": False}))
    model = GoldenGpt()
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = trainsentry.TrainerMon(str(path))
    monitor.set_monitor(model, optimizer)
    now = {
        2: lambda: path.write_text(json.dumps({**settings, "dynamic_on": True})),
        6: lambda: path.write_text(
            json.dumps({**settings, "dynamic_on": True, "collect_times": 1, "step_interval": 2})
        ),
    }
    train_golden(model, optimizer, 11, lambda step: now.get(step, lambda: None)())
    monitor.close()
    [directory] = out.glob("*-rank0-*")
    steps = sorted(int(p.stem.rpartition("-")[2]) for p in directory.glob("grad_reduced_*"))
    assert steps == [3, 4, 8]
    assert json.loads(path.read_text())["dynamic_on"] is False


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ops": ["norm", "median"]}, r"ops\.1: got 'median'"),
        ({"step_interval": 0}, "step_interval: got 0"),
        ({"alert": {"rules": [{"rule_name": "AnomalyTurbulance"}]}}, "AnomalyTurbulence"),
        ({"targets": {"blocks.9": {}}}, r"'blocks\.9\*' matches no"),
    ],
)
def test_a_wrong_value_is_named_before_the_first_step(written, changes, message):
    with pytest.raises(ValueError, match=message):
        written(**changes)


def test_a_second_generation_configuration_is_named(tmp_path):
    with pytest.raises(ConfigError, match="config convert"):
        trainsentry.TrainerMon(str(DATA / "second.json"))


SCRIPT_OF_MSPROBE = """
import torch
from msprobe.pytorch import PrecisionDebugger, TrainerMon, module_dump, module_dump_end, seed_all
from msprobe.pytorch.monitor.module_hook import TrainerMon as Hooked
from msprobe.pytorch.monitor.csv2tb import csv2tensorboard_by_step
import msprobe.mindspore.monitor.module_hook as for_mindspore

seed_all(1)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
monitor = TrainerMon(config_file_path="config.json", process_group=None, params_have_main_grad=False)
monitor.set_monitor(model, grad_acc_steps=1, optimizer=optimizer, dp_group=None, tp_group=None, start_iteration=3)
for _ in range(2):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
assert Hooked is TrainerMon is for_mindspore.TrainerMon
"""


def test_replacing_the_packages_name_suffices(out, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"targets": {}, "wg_distribution": True, "format": "csv"}))
    script = Script(SCRIPT_OF_MSPROBE.replace("msprobe", "trainsentry"), [], tmp_path)
    process = start_forked(script, environment={**os.environ, "MONITOR_OUTPUT_DIR": str(out)})
    _, told = process.communicate()
    assert process.returncode == 0, told
    [directory] = out.glob("*-rank0-*")
    expected = {f"grad_{kind}_{step}-{step}.csv" for kind in ("reduced", "unreduced") for step in (3, 4)}
    assert {p.name for p in directory.iterdir()} == expected
