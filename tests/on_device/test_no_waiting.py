"""A watched step neither waits for the device nor reads a value of it, and copies to the host once."""

import contextlib
from collections import Counter

import pytest
import torch
from device_training import EVERYTHING, adamw, batch, config_of, loss_of, new_model
from the_device import DEVICE, needs, needs_an_accelerator, synchronize
from torch.profiler import ProfilerActivity, profile

import trainsentry


@contextlib.contextmanager
def forbidden_to_wait():
    """Raise at every wait of the host for the device."""
    module = torch.get_device_module(DEVICE)
    module.set_sync_debug_mode("error")
    try:
        yield
    finally:
        module.set_sync_debug_mode("default")


@needs("set_sync_debug_mode")
@pytest.mark.parametrize("collect", ["default", "everything"])
def test_a_watched_step_never_waits_for_the_device(out, collect):
    model = new_model()
    optimizer = adamw(model)
    config = config_of(out, **({"collect": EVERYTHING} if collect == "everything" else {}))
    batches = [batch(step) for step in range(30)]
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        for step, (inputs, targets) in enumerate(batches):
            with forbidden_to_wait() if step >= 5 else contextlib.nullcontext():
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
                loss.backward()
                monitor.log(loss=loss)
                optimizer.step()
        monitor.flush()
        assert monitor.incidents == ()
        assert set(monitor.records()["step"]) >= set(range(5, 30))


@needs("set_sync_debug_mode")
def test_the_check_notices_a_wait():
    with forbidden_to_wait(), pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones(1, device=DEVICE).item()


def operations(config):
    """Return the operations and copies of one step after three, counted by name."""
    model = new_model()
    optimizer = adamw(model)
    monitor = trainsentry.TrainMonitor(config).watch(model, optimizer) if config is not None else None

    def step(number):
        loss_of(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(3):
        step(number)
    synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        step(3)
        synchronize()
    if monitor is not None:
        monitor.close()
    return Counter(event.name for event in profiled.events())


@pytest.mark.skipif(DEVICE.type != "cuda", reason="torch's profiler counts the copies of CUDA only")
def test_a_step_takes_one_copy_to_the_host_and_reads_no_value(out):
    bare, watched = operations(None), operations(config_of(out, collect=EVERYTHING))
    copies = sum(n for name, n in (watched - bare).items() if name.startswith("Memcpy DtoH"))
    assert copies == 1
    assert watched["aten::_local_scalar_dense"] == bare["aten::_local_scalar_dense"]


@needs_an_accelerator
@pytest.mark.parametrize("inputs", [False, True])
def test_an_unsampled_step_reads_nothing_but_the_inputs_of_the_model(out, inputs):
    collect = {part: {"every": 10} for part in EVERYTHING}
    collect["activations"]["inputs"] = inputs
    bare, watched = operations(None), operations(config_of(out, collect=collect))
    added = {name: n for name, n in (watched - bare).items() if name.startswith(("aten::", "Memcpy", "Memset"))}
    if not inputs:
        assert added == {}
    else:
        assert sum(n for name, n in added.items() if name.startswith("Memcpy DtoH")) == 1
        assert not any("reduce" in name or name in {"aten::sum", "aten::amin", "aten::aminmax"} for name in added), (
            added
        )
