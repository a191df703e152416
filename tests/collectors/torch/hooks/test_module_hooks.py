"""Several monitors, shared modules and replicas use the same hooks, and closing a monitor removes its own."""

import copy

import torch
from tiny_models import step
from torch import nn

import trainsentry
from trainsentry.collectors.torch.hooks.module_hooks import ModuleHooks


def make():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def monitor_at(out, every=1):
    return trainsentry.TrainMonitor(
        {"output_dir": str(out), "collect": {"activations": {"every": every}}, "strict": True}
    )


def hooks_of(model):
    return [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]


def outputs(monitor):
    records = monitor.records()
    return records[(records.name == "0.output.0") & (records.quantity == "activation_output")]


def test_a_monitor_that_takes_over_from_another_has_its_own_samples(tmp_path):
    model, optimizer = make()
    first = monitor_at(tmp_path / "first", every=5).watch(model, optimizer)
    for _ in range(2):
        step(model, optimizer)
    second = monitor_at(tmp_path / "second", every=4).watch(model, optimizer)
    for _ in range(9):
        step(model, optimizer)
    assert set(outputs(first).step) == {0}
    assert set(outputs(second).step) == {0, 4, 8}
    second.close()
    first.close()
    assert not hooks_of(model)


def test_a_module_that_is_a_chunk_and_inside_another_is_taken_once(tmp_path):
    model, optimizer = make()
    with monitor_at(tmp_path).watch([model, model[0]], optimizer) as monitor:
        step(model, optimizer)
        assert len(outputs(monitor)) == 1
    assert not hooks_of(model)


def test_a_replica_that_shares_the_hooks_is_observed(tmp_path):
    """As DataParallel makes them: a shallow copy, with its members and hooks."""
    model, optimizer = make()
    with monitor_at(tmp_path).watch(model, optimizer) as monitor:
        replica = copy.copy(model)
        replica._modules = {name: copy.copy(child) for name, child in model._modules.items()}
        step(replica, optimizer)
        assert len(outputs(monitor)) == 1


def test_what_was_not_called_carries_nothing_after_the_close(tmp_path):
    """Something else in the process was compiled meanwhile; the unused head is no part of its graphs."""
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    model, optimizer = make()
    whole = nn.ModuleDict({"used": model, "unused": nn.Linear(2, 2)})
    with monitor_at(tmp_path).watch(whole, optimizer):
        for _ in range(3):
            step(model, optimizer)
    assert not hooks_of(whole)
    assert not any("trainsentry" in name for m in whole.modules() for name in vars(m))


def test_a_close_inside_a_capture_that_never_ends_closes(tmp_path):
    model, optimizer = make()
    monitor = monitor_at(tmp_path).watch(model, optimizer)
    step(model, optimizer)
    monitor._guard.suspended += 1
    monitor.close()
    assert not hooks_of(model)
    assert not optimizer._optimizer_step_pre_hooks
    assert (tmp_path / "rank0" / "status.json").exists()


def test_steps_without_a_sample_look_at_no_module_once_the_hooks_are_off(tmp_path, monkeypatch):
    model, optimizer = make()
    with monitor_at(tmp_path, every=5).watch(model, optimizer):
        looks, detach = [], ModuleHooks.detach

        def counted(self, stays):
            looks.append(1)
            detach(self, stays)

        monkeypatch.setattr(ModuleHooks, "detach", counted)
        for _ in range(10):
            step(model, optimizer)
        assert len(looks) == 2  # behind each of the two samples
        monkeypatch.undo()
