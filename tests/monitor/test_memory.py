"""Memory does not grow with the steps: kept records are counted exactly, and buffers exist from the start."""

import gc
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch
from tiny_models import mlp, train

import trainsentry
from trainsentry.monitor.recorder.ring import Ring


def test_the_flight_recorder_counts_what_it_holds(out):
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    collect = {"parameters": False, "optimizer_state": False, "updates": False, "activations": False}
    settings = {"output_dir": str(out), "collect": collect, "detect": False}
    with trainsentry.TrainMonitor(settings).watch(model, optimizer) as monitor:
        kept = monitor._loop.outbox
        train(model, optimizer, 50, monitor)
        gc.collect()
        tracemalloc.start()
        try:
            counted, held = kept.held_bytes, tracemalloc.get_traced_memory()[0]
            train(model, optimizer, 500, monitor)
            gc.collect()
            counted, held = kept.held_bytes - counted, tracemalloc.get_traced_memory()[0] - held
        finally:
            tracemalloc.stop()
    assert held < 1.3 * counted
    assert counted < 1.5 * held


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux says what is resident")
def test_the_ring_is_resident_from_the_start():
    ring = Ring.create(2**22)
    try:
        maps = Path("/proc/self/smaps").read_text().split("trainsentry-ring")[1]
        assert int(maps.split("Rss:")[1].split()[0]) * 1024 >= 2**22
    finally:
        ring.close()
