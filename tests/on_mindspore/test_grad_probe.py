"""grad_probe on MindSpore records the optimizer's gradients, and leaves training unchanged."""

import json

import mindspore as ms
import numpy as np
import pytest
from cells import batches, net, train, weights
from mindspore import nn
from typer.testing import CliRunner
from written_files import grad_summary

from trainsentry import PrecisionDebugger
from trainsentry.monitor.cli.app import app


def probed(folder, level, rate=1e-2, **settings):
    """Train two steps with a probe; return the model and where it wrote."""
    folder.mkdir()
    path = folder / "config.json"
    block = {"grad_level": level, **settings}
    path.write_text(json.dumps({"task": "grad_probe", "dump_path": str(folder / "out"), "grad_probe": block}))
    model = net(layers=1)
    optimizer = nn.Momentum(model.trainable_params(), rate, 0.9)
    debugger = PrecisionDebugger(str(path))
    debugger.monitor(optimizer)
    train(model, optimizer, 2)
    assert debugger._session.guard.failures == {}
    debugger.close()
    return model, folder / "out"


def first_gradients():
    model = net(layers=1)
    parameters = model.trainable_params()
    [(x, y)] = batches(1)
    grad = ms.value_and_grad(lambda x, y: nn.MSELoss()(model(x), y), None, parameters)
    return {p.name: g.asnumpy() for p, g in zip(parameters, grad(x, y)[1], strict=True)}


@pytest.mark.parametrize("level", ["L0", "L1", "L2"])
def test_the_values_are_those_of_the_gradients(tmp_path, level):
    _, out = probed(tmp_path / "a", level)
    found, known = grad_summary(out), first_gradients()
    assert list(found) == list(known)
    for name, gradient in known.items():
        assert float(found[name]["norm"]) == pytest.approx(np.linalg.norm(gradient), rel=1e-6)
        assert (float(found[name]["max"]), float(found[name]["min"])) == (gradient.max(), gradient.min())
        signs = out / "rank0" / "step0" / f"{name}.npy"
        assert signs.exists() == (level != "L0")
        if signs.exists():
            assert np.array_equal(np.load(signs), gradient > 0)
        if level == "L2":
            share = np.mean((gradient > 0) & (gradient <= 1))
            assert float(found[name]["(0.0, 1.0]"]) == pytest.approx(share)
    assert (out / "rank0" / "grad_summary_1.csv").exists()


def test_training_is_the_same_to_the_bit(tmp_path):
    model, _ = probed(tmp_path / "a", "L1")
    bare = net(layers=1)
    train(bare, nn.Momentum(bare.trainable_params(), 1e-2, 0.9), 2)
    assert all(np.array_equal(a, b) for a, b in zip(weights(model), weights(bare), strict=True))
    assert type(bare) is type(model)


def test_two_runs_are_compared_by_their_directions(tmp_path):
    _, a = probed(tmp_path / "a", "L1")
    _, b = probed(tmp_path / "b", "L1", rate=30.0)
    result = CliRunner().invoke(app, ["compare", str(a), str(b), "-o", str(tmp_path / "c.csv")])
    assert (result.exit_code, "first differ in direction at step 1" in result.stdout) == (1, True)


def test_chosen_parameters_alone_and_none_that_there_is_not(tmp_path):
    _, out = probed(tmp_path / "a", "L0", param_list=["head.weight"])
    assert list(grad_summary(out)) == ["head.weight"]
    with pytest.raises(ValueError, match=r"grad_probe.param_list: 'nothing'; allowed: names of the optimizer"):
        probed(tmp_path / "b", "L0", param_list=["nothing"])


def test_a_model_has_no_gradients_of_its_own(tmp_path):
    PrecisionDebugger(task="grad_probe", dump_path=str(tmp_path))
    with pytest.raises(TypeError, match=r"monitor\(optimizer\): got Net; allowed: mindspore.nn.Optimizer"):
        PrecisionDebugger.monitor(net(layers=1))
