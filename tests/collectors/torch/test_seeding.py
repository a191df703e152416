"""One seed makes every source of random numbers draw the same."""

import random

import numpy as np
import pytest
import torch
from torch import nn

import trainsentry


@pytest.fixture(autouse=True)
def _restore():
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()
    dropouts = {n: getattr(nn.functional, n) for n in dir(nn.functional) if "dropout" in n}
    yield
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


def test_deterministic_algorithms_are_chosen(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "mine")
    trainsentry.seed_all(mode=True)
    assert torch.are_deterministic_algorithms_enabled()


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
