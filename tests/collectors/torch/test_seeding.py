"""One seed makes every source of random numbers draw the same."""

import os
import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import trainsentry


@pytest.fixture(autouse=True)
def _restore():
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()
    dropouts = [(m, n, getattr(m, n)) for m in (nn.functional, torch) for n in dir(m) if "dropout" in n]
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.enabled
    hash_seed = os.environ.get("PYTHONHASHSEED")
    yield
    torch.backends.cudnn.deterministic, torch.backends.cudnn.enabled = cudnn
    os.environ.pop("PYTHONHASHSEED", None)
    if hash_seed is not None:
        os.environ["PYTHONHASHSEED"] = hash_seed
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])
    torch.use_deterministic_algorithms(False)
    for module, name, function in dropouts:
        setattr(module, name, function)


def draws():
    return random.random(), float(np.random.rand()), torch.rand(1).item()


def test_every_source_draws_the_same():
    trainsentry.seed_all(5, rm_dropout=False)
    first = draws()
    trainsentry.seed_all(5, rm_dropout=False)
    assert draws() == first
    trainsentry.seed_all(6, rm_dropout=False)
    assert draws() != first


def test_every_device_is_seeded(monkeypatch):
    """Stand-ins for devices record the calls they get."""
    asked = []
    npu = SimpleNamespace(is_available=lambda: True, manual_seed_all=lambda seed: asked.append(("npu", seed)))
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(npu=npu))
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: asked.append(("cuda", seed)))
    trainsentry.seed_all(7, rm_dropout=False)
    assert sorted(asked) == [("cuda", 7), ("npu", 7)]
    assert os.environ["PYTHONHASHSEED"] == "7"


def test_deterministic_algorithms_are_chosen(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "mine")
    for name in ("HCCL_DETERMINISTIC", "LCCL_DETERMINISTIC"):
        monkeypatch.setenv(name, "false")
    trainsentry.seed_all(mode=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.enabled
    assert [os.environ[n] for n in ("HCCL_DETERMINISTIC", "CUBLAS_WORKSPACE_CONFIG")] == ["true", "mine"]


@pytest.mark.parametrize("asked", [{}, {"rm_dropout": True}])
def test_dropout_is_taken_out_unless_it_is_to_stay(asked):
    layer, x = nn.Dropout(0.9), torch.ones(100)
    trainsentry.seed_all(rm_dropout=False)
    assert (layer(x) == 0).any()
    assert (torch.dropout(x, 0.9, train=True) == 0).any()
    trainsentry.seed_all(**asked)
    calls = [layer, lambda x: torch.dropout(x, p=0.9, train=True), lambda x: torch.alpha_dropout(x, 0.9, True)]
    calls += [lambda x: F.dropout(x, 0.9, training=True), lambda x: torch.dropout_(x, 0.9, True), nn.AlphaDropout(0.9)]
    assert all(torch.equal(call(x), x) for call in calls)


@pytest.mark.parametrize(
    ("arguments", "error"), [({"seed": -1}, ValueError), ({"seed": True}, ValueError), ({"mode": 1}, TypeError)]
)
def test_wrong_arguments_are_named(arguments, error):
    with pytest.raises(error, match=f"{next(iter(arguments))}: got"):
        trainsentry.seed_all(**arguments)
