"""One seed makes every source of random numbers draw the same."""

import os
import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import trainsentry


@pytest.fixture(autouse=True)
def _restore():
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()
    dropouts = {n: getattr(nn.functional, n) for n in dir(nn.functional) if "dropout" in n}
    deterministic = torch.backends.cudnn.deterministic
    hash_seed = os.environ.get("PYTHONHASHSEED")
    yield
    torch.backends.cudnn.deterministic = deterministic
    os.environ.pop("PYTHONHASHSEED", None)
    if hash_seed is not None:
        os.environ["PYTHONHASHSEED"] = hash_seed
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])
    torch.use_deterministic_algorithms(False)
    for name, function in dropouts.items():
        setattr(nn.functional, name, function)


def draws():
    return random.random(), float(np.random.rand()), torch.rand(1).item()


def test_every_source_draws_the_same():
    trainsentry.seed_all(5)
    first = draws()
    trainsentry.seed_all(5)
    assert draws() == first
    trainsentry.seed_all(6)
    assert draws() != first


def test_every_device_is_seeded(monkeypatch):
    """Stand-ins for devices record the calls they get."""
    asked = []
    npu = SimpleNamespace(is_available=lambda: True, manual_seed_all=lambda seed: asked.append(("npu", seed)))
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(npu=npu))
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: asked.append(("cuda", seed)))
    trainsentry.seed_all(7)
    assert sorted(asked) == [("cuda", 7), ("npu", 7)]
    assert os.environ["PYTHONHASHSEED"] == "7"


def test_deterministic_algorithms_are_chosen(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "mine")
    for name in ("HCCL_DETERMINISTIC", "LCCL_DETERMINISTIC"):
        monkeypatch.setenv(name, "false")
    trainsentry.seed_all(mode=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.deterministic
    assert [os.environ[n] for n in ("HCCL_DETERMINISTIC", "CUBLAS_WORKSPACE_CONFIG")] == ["true", "mine"]


def test_dropout_is_taken_out_only_when_asked():
    layer, x = nn.Dropout(0.9), torch.ones(100)
    trainsentry.seed_all()
    assert (layer(x) == 0).any()
    trainsentry.seed_all(rm_dropout=True)
    assert torch.equal(layer(x), x)


@pytest.mark.parametrize(
    ("arguments", "error"), [({"seed": -1}, ValueError), ({"seed": True}, ValueError), ({"mode": 1}, TypeError)]
)
def test_wrong_arguments_are_named(arguments, error):
    with pytest.raises(error, match=f"{next(iter(arguments))}: got"):
        trainsentry.seed_all(**arguments)
