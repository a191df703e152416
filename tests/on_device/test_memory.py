"""The monitor adds no more of the device's memory than its stated bound."""

import gc

import pytest
import torch
from device_training import EVERYTHING, assert_same, config_of, train
from the_device import DEVICE, MODULE, needs
from torch import nn

import trainsentry

MB = 2**20

BOUND = 8 * MB + 256 * MB + 16 * MB
"""Partial rows, gathered activations, and rows and tables of a model this small."""


def peak(config, training=train):
    """Return the largest number of bytes that a training had allocated on the device, above those before it."""
    gc.collect()
    MODULE.empty_cache()
    MODULE.reset_peak_memory_stats()
    before = MODULE.memory_allocated()
    training(config)
    return MODULE.max_memory_allocated() - before


@needs("reset_peak_memory_stats")
@pytest.mark.parametrize("collect", ["default", "everything"])
def test_peak_memory_grows_by_no_more_than_the_bound(out, collect):
    train()  # libraries take their workspaces once
    config = config_of(out, **({"collect": EVERYTHING} if collect == "everything" else {}))
    bare, watched = peak(None), peak(config)
    assert watched - bare <= BOUND, f"{DEVICE}: {(watched - bare) / MB:.1f} MB"


def train_wide(config):
    """Train layers whose outputs have 64 MB each, and whose gradients are freed one after the other."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(24))).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(16 * 1024, 1024).to(DEVICE)
    monitor = trainsentry.TrainMonitor(config).watch(model, optimizer) if config is not None else None
    for _ in range(3):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if monitor is not None:
        monitor.close()


@needs("reset_peak_memory_stats")
def test_tensors_that_are_kept_until_they_are_read_together_stay_within_the_bound(out):
    train_wide(None)
    bare, watched = peak(None, train_wide), peak(config_of(out, collect=EVERYTHING), train_wide)
    assert watched - bare <= BOUND, f"{DEVICE}: {(watched - bare) / MB:.1f} MB"


@needs("set_per_process_memory_fraction")
def test_where_the_device_has_no_memory_left_for_the_monitor_training_goes_on_unchanged(out):
    total = MODULE.mem_get_info()[1]
    peak(None)
    bare, held = train(), MODULE.max_memory_reserved()
    MODULE.empty_cache()
    MODULE.set_per_process_memory_fraction((held + 4 * MB) / total)
    try:
        watched = train({"output_dir": str(out), "collect": EVERYTHING})
    finally:
        MODULE.set_per_process_memory_fraction(1.0)
    assert_same(bare, watched)


@needs("reset_peak_memory_stats")
def test_a_closed_monitor_leaves_nothing_on_the_device(out):
    train(config_of(out / "first", collect=EVERYTHING), steps=4)
    gc.collect()
    before = MODULE.memory_allocated()
    train(config_of(out / "second", collect=EVERYTHING), steps=4)
    gc.collect()
    assert MODULE.memory_allocated() <= before
