"""grad_probe writes the gradients that an update is made of; two runs are compared by their directions."""

import json

import numpy as np
import pytest
import torch
from debugged import Tower, make, train
from typer.testing import CliRunner
from written_files import grad_summary

from trainsentry import PrecisionDebugger
from trainsentry.monitor.cli.app import app


def probe(folder, level, steps=2, sign=1.0, first=0, **settings):
    folder.mkdir()
    path = folder / "config.json"
    block = {"grad_level": level, **settings}
    path.write_text(json.dumps({"task": "grad_probe", "dump_path": str(folder / "out"), "grad_probe": block}))
    debugger = PrecisionDebugger(str(path))
    model = make(Tower)
    if sign < 0:
        model.first.weight.register_hook(lambda g: -g)
    debugger.monitor(model)
    if first:
        debugger.set_init_step(first)
    train(model, steps, debugger)
    assert debugger._session.guard.failures == {}
    debugger.close()
    return folder / "out"


@pytest.mark.parametrize("level", ["L0", "L1", "L2"])
def test_the_columns_of_each_level(tmp_path, level):
    out = probe(tmp_path / "a", level)
    columns = list(grad_summary(out)["first.weight"])
    middle = {"L0": ["MD5"], "L1": [], "L2": ["(-inf, -1.0]", "(-1.0, 0.0]", "(0.0, 1.0]", "(1.0, inf)", "=0"]}[level]
    assert columns == ["param_name", *middle, "max", "min", "norm", "shape"]
    assert (out / "rank0" / "grad_summary_1.csv").exists()
    assert (out / "rank0" / "step0" / "first.weight.npy").exists() == (level != "L0")
    if level == "L2":
        shares = [float(grad_summary(out)["first.weight"][c]) for c in middle[:-1]]
        assert sum(shares) == pytest.approx(1.0)


def test_the_values_are_those_of_the_gradients(tmp_path):
    model = make(Tower)
    generator = torch.Generator().manual_seed(3)
    model(torch.randn(6, 4, generator=generator)).square().mean().backward()
    out = probe(tmp_path / "a", "L1", steps=1, param_list=["first.weight"])
    [row] = grad_summary(out).values()
    assert float(row["norm"]) == pytest.approx(model.first.weight.grad.norm().item(), rel=1e-6)
    signs = np.load(out / "rank0" / "step0" / "first.weight.npy")
    assert np.array_equal(signs, (model.first.weight.grad > 0).numpy())


def test_a_gradient_that_points_the_other_way_is_found(tmp_path):
    a = probe(tmp_path / "a", "L1")
    b = probe(tmp_path / "b", "L1", sign=-1.0)
    result = CliRunner().invoke(app, ["compare", str(a), str(b), "-o", str(tmp_path / "c.csv")])
    assert result.exit_code == 1
    assert "they first differ in direction at step 0, first.weight: 0.0% of the signs are equal" in result.stdout
    same = CliRunner().invoke(app, ["compare", str(a), str(a), "-o", str(tmp_path / "c.csv")])
    assert (same.exit_code, "they do not differ in direction" in same.stdout) == (0, True)


def test_a_parameter_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"grad_probe.param_list: 'nothing'; allowed: names"):
        probe(tmp_path / "a", "L1", param_list=["nothing"])


def test_a_resumed_run_goes_on_counting(tmp_path):
    out = probe(tmp_path / "a", "L0", first=40)
    assert sorted(p.name for p in (out / "rank0").glob("*.csv")) == ["grad_summary_40.csv", "grad_summary_41.csv"]
