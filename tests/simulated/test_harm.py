"""Watching a model on a device changes no bit, never makes the host wait, and leaves a capture alone."""

import on_device
import pytest
import simulated_npu
import torch
from tiny_models import Gpt, ResNet, mlp

import trainsentry
from trainsentry.collectors.torch.rows.row_lock import ADDING

STEPS = 5


def same(a, b):
    return a[0] == b[0] and all(torch.equal(a[1][name], value) for name, value in b[1].items())


@pytest.mark.parametrize("kind", [Gpt, ResNet, mlp])
def test_losses_and_weights_are_equal_to_the_bit(out, kind):
    bare = on_device.bare("npu", STEPS, kind)
    assert same(on_device.watched(out, "npu", STEPS, kind), bare)


def test_with_the_default_configuration_too(out):
    bare = on_device.bare("npu", STEPS)
    model, optimizer = on_device.make("npu")
    with trainsentry.TrainMonitor({"output_dir": str(out)}).watch(model, optimizer) as monitor:
        losses = on_device.train(model, optimizer, on_device.batches(model, STEPS, "npu"), monitor)
    assert same(([x.item() for x in losses], on_device.state(model)), bare)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_with_a_scaler_too(out, dtype):
    def run(monitor_config):
        model, optimizer = on_device.make("npu")
        data = on_device.batches(model, STEPS, "npu")
        scaler = torch.amp.GradScaler("npu", enabled=dtype is torch.float16)
        if monitor_config is None:
            losses = on_device.train(model, optimizer, data, autocast=dtype, scaler=scaler)
        else:
            with trainsentry.TrainMonitor(monitor_config).watch(model, optimizer, grad_scaler=scaler) as monitor:
                losses = on_device.train(model, optimizer, data, monitor, autocast=dtype, scaler=scaler)
                assert set(monitor.records().step) == set(range(STEPS))
        return [x.item() for x in losses], on_device.state(model)

    assert same(run(on_device.everything(out)), run(None))


def test_the_host_never_waits_for_the_device(out, no_waiting):
    model, optimizer = on_device.make("npu")
    data = on_device.batches(model, STEPS, "npu")
    with trainsentry.TrainMonitor(on_device.everything(out)).watch(model, optimizer) as monitor:
        on_device.train(model, optimizer, data, monitor)
    assert len(list(out.glob("rank0/gradient_*.csv"))) == 1


def test_a_step_is_copied_to_the_host_once(out):
    model, optimizer = on_device.make("npu")
    data = on_device.batches(model, STEPS, "npu")
    with trainsentry.TrainMonitor(on_device.everything(out)).watch(model, optimizer) as monitor:
        before = simulated_npu.counter("copies to the host")
        on_device.train(model, optimizer, data, monitor)
        monitor.flush()
        assert simulated_npu.counter("copies to the host") - before == STEPS


def test_a_captured_step_is_left_alone_and_the_next_one_is_recorded(out):
    model, optimizer = on_device.make("npu", mlp)
    data = on_device.batches(model, 3, "npu")
    with trainsentry.TrainMonitor(on_device.everything(out)).watch(model, optimizer) as monitor:
        on_device.train(model, optimizer, data[:1], monitor)
        graph = torch.npu.NPUGraph()
        graph.capture_begin()
        on_device.train(model, optimizer, data[1:2])
        graph.capture_end()
        on_device.train(model, optimizer, data[2:], monitor)
        assert set(monitor.records().step) == {0, 1}
    assert vars(torch.npu.NPUGraph)["replay"].__module__ == "simulated_npu.npu_module"


@pytest.fixture
def kept_parameters():
    """A module that is moved keeps its parameters, as it does on CUDA."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def test_a_part_that_is_moved_to_a_device_after_watch_brings_the_lock_with_the_next_activations(out, kept_parameters):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = on_device.everything(out) | {"collect": {"activations": {"every": 2}}}
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        locked = []
        for step in range(3):
            place = "npu:0" if step else "cpu"
            model[1].to(place)
            locked.append(set(ADDING) <= vars(monitor._loop.watch.rows).keys())
            model[1](model[0](torch.ones(3, 4)).to(place)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert locked == [False, False, True]


def test_two_devices_in_one_process(out):
    torch.manual_seed(0)
    first, second = torch.nn.Linear(4, 4).to("npu:0"), torch.nn.Linear(4, 2).to("npu:1")
    both = torch.nn.ModuleList([first, second])
    optimizer = torch.optim.SGD(both.parameters(), lr=0.1)
    with trainsentry.TrainMonitor(on_device.everything(out)).watch(both, optimizer) as monitor:
        for _ in range(2):
            second(first(torch.ones(3, 4, device="npu:0")).to("npu:1")).sum().backward()
            held = {n: p.grad.cpu().double().norm().item() for n, p in both.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
        records = monitor.records()
    newest = records[(records.quantity == "gradient") & (records.step == 1)]
    assert dict(zip(newest.name, newest.norm, strict=True)) == pytest.approx(held, rel=1e-6)
