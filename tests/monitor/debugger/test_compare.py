"""Comparing two dumps or two runs gives the first difference, its size, and the entries that only one has."""

import csv
import json
import shutil

import numpy as np
import pytest
import torch
from debugged import Tower, debug, make
from tiny_models import mlp
from tiny_models import train as train_monitored
from typer.testing import CliRunner

import trainsentry
from trainsentry import PrecisionDebugger
from trainsentry.exporters.files.foreign_files import InputError
from trainsentry.monitor.cli.app import app
from trainsentry.monitor.offline.compare_runs import compare


def changed(by=1.01):
    model = make(Tower)
    with torch.no_grad():
        model.blocks[1].fc1.weight.mul_(by)
    return model


@pytest.mark.parametrize("task", ["statistics", "tensor"])
def test_the_first_place_where_two_dumps_part(tmp_path, task):
    debug(tmp_path / "a", task=task, level="mix")
    debug(tmp_path / "b", task=task, level="mix", model=changed())
    compared = compare(tmp_path / "a" / "dump", tmp_path / "b" / "dump")
    assert compared.first[2:4] == ("Functional.linear.3.forward", "input.1")
    assert "they first differ at step 0, rank 0, Functional.linear.3.forward (input.1)" in compared.summary
    if task == "tensor":
        cosine, relative = compared.first[6], compared.first[5]
        assert cosine == pytest.approx(1.0)
        assert relative == pytest.approx(1 - 1 / 1.01, rel=1e-3)
    assert compared.only_in_one == 0


def test_equal_dumps_do_not_part_and_checksums_are_used(tmp_path):
    debug(tmp_path / "a", level="mix", statistics={"summary_mode": "md5"})
    debug(tmp_path / "b", level="mix", statistics={"summary_mode": "md5"})
    assert compare(tmp_path / "a" / "dump", tmp_path / "b" / "dump").first is None
    debug(tmp_path / "c", level="mix", statistics={"summary_mode": "md5"}, model=changed(1 + 1e-6))
    first = compare(tmp_path / "a" / "dump", tmp_path / "c" / "dump").first
    assert (first[2], first[-1]) == ("Functional.linear.3.forward", "checksums differ")


def test_names_that_differ_are_mapped_and_the_rest_is_told(tmp_path):
    debug(tmp_path / "a", level="L0")
    debug(tmp_path / "b", level="L0", model=torch.nn.Sequential(make(Tower)))
    plain = compare(tmp_path / "a" / "dump", tmp_path / "b" / "dump")
    assert plain.only_in_one > 10
    names = tmp_path / "names.json"
    names.write_text(json.dumps({"Module.": "Module.0."}))
    table = tmp_path / "table.csv"
    dumps = [str(tmp_path / x / "dump") for x in "ab"]
    result = CliRunner().invoke(app, ["compare", *dumps, "--names", str(names), "-o", str(table)])
    assert "they do not differ" in result.stdout
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    extra = {row["call"] for row in rows if row["status"] == "extra"}
    assert extra == {"Module.0.Tower.forward.0", "Module.0.Tower.backward.0"}


def test_two_monitored_runs(tmp_path):
    for name, by in (("a", 0.0), ("b", 1e-3)):
        torch.manual_seed(0)
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with trainsentry.TrainMonitor({"output_dir": str(tmp_path / name)}).watch(model, optimizer) as monitor:

            def before_step(step, model=model, by=by):
                if step == 4:
                    with torch.no_grad():
                        model[2].weight += by

            train_monitored(model, optimizer, 8, monitor, before_step=before_step)
    compared = compare(tmp_path / "a", tmp_path / "b")
    assert compared.first[0] == 4
    assert compare(tmp_path / "a", tmp_path / "a").first is None


def test_runs_whose_layers_have_other_names(tmp_path):
    for name, layers in (("a", ["first", "second"]), ("b", ["encoder.first", "second"])):
        torch.manual_seed(0)
        parts = {layer: torch.nn.Linear(4, 4) for layer in layers}
        model = torch.nn.Module()
        for layer, part in parts.items():
            folder, _, own = layer.rpartition(".")
            if folder:
                model.add_module(folder, torch.nn.Module())
            model.get_submodule(folder).add_module(own, part)
        model.forward = lambda x, parts=parts: parts["second"](next(iter(parts.values()))(x))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with trainsentry.TrainMonitor({"output_dir": str(tmp_path / name)}).watch(model, optimizer):
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
    assert compare(tmp_path / "a", tmp_path / "b").only_in_one > 0
    same = compare(tmp_path / "a", tmp_path / "b", {"first": "encoder.first"})
    gradients = [row for row in same.rows if row[2] == "gradient"]
    assert (same.first, gradients) == (None, [])
    names = tmp_path / "names.json"
    names.write_text('{"first": "encoder.first"}')
    where = ["-o", str(tmp_path / "table.csv")]
    result = CliRunner().invoke(
        app, ["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--names", str(names), *where]
    )
    assert "they do not differ" in result.output


def test_folders_of_different_kinds_and_of_none(tmp_path):
    debug(tmp_path / "a", level="L0")
    (tmp_path / "empty").mkdir()
    for other in ("empty", "nowhere"):
        result = CliRunner().invoke(app, ["compare", str(tmp_path / "a" / "dump"), str(tmp_path / other)])
        assert result.exit_code == 2


def test_nothing_in_a_tensor_file_is_run(tmp_path):
    import pickle

    debug(tmp_path / "a", task="tensor", level="L0")
    debug(tmp_path / "b", task="tensor", level="L0")
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return marker.write_text, ("x",)

    for path in (tmp_path / "b").glob("dump/*/*/dump_tensor_data/*.pt"):
        path.unlink()
        path.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(InputError, match="cannot be loaded as a tensor"):
        compare(tmp_path / "a" / "dump", tmp_path / "b" / "dump")
    assert not marker.exists()


def test_steps_that_only_one_has_are_told(tmp_path):
    debug(tmp_path / "a", 3, level="L0")
    debug(tmp_path / "b", 1, level="L0")
    shutil.move(tmp_path / "b" / "dump" / "step0", tmp_path / "b" / "dump" / "step1")
    shutil.copytree(tmp_path / "a" / "dump" / "step0", tmp_path / "b" / "dump" / "step0")
    compared = compare(tmp_path / "a" / "dump", tmp_path / "b" / "dump")
    assert compared.only_in_one == 1


def test_conjugated_tensors_are_compared(tmp_path):
    for name in "ab":
        debugger = PrecisionDebugger(task="tensor", level="L1", dump_path=str(tmp_path / name))
        debugger.start()
        c = torch.ones(2, 2, dtype=torch.complex64)
        c.conj() @ c
        debugger.stop()
        debugger.step()
        debugger.close()
    assert compare(tmp_path / "a", tmp_path / "b").first is None


def test_arrays_of_the_other_framework_are_loaded_without_pickles(tmp_path):
    from trainsentry.monitor.offline.compare_runs import load_array

    np.save(tmp_path / "a.npy", np.ones(3))
    assert load_array(tmp_path / "a.npy").sum() == 3
    np.save(tmp_path / "b.npy", np.array([object()]), allow_pickle=True)
    with pytest.raises(InputError, match="expected numbers"):
        load_array(tmp_path / "b.npy")


def test_a_page_is_made_of_monitored_runs_alone(tmp_path):
    for name in "ab":
        debug(tmp_path / name, level="L0")
    dumps = [str(tmp_path / x / "dump") for x in "ab"]
    page = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["compare", *dumps, "-o", str(tmp_path / "c.csv"), "--html", str(page)])
    assert (result.exit_code, "are no monitored runs" in result.output, page.exists()) == (2, True, False)
