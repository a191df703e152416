"""What counts, replaces or follows operations sees the model's alone: checkpoints, counters, modes, tracing, fusing."""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import trainsentry
from trainsentry.collectors.torch.hooks import active_modes

MATMULS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


def saved_matmuls(_ctx, operation, *_args, **_kwargs):
    return CheckpointPolicy.MUST_SAVE if operation in MATMULS else CheckpointPolicy.PREFER_RECOMPUTE


class Selective(nn.Module):
    """Three layers of unequal sizes in a checkpoint that keeps the results of matrix products by their number."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8), nn.GELU(), nn.Linear(8, 8))

    def forward(self, x):
        contexts = partial(create_selective_checkpoint_contexts, saved_matmuls)
        return checkpoint(self.layers, x, use_reentrant=False, context_fn=contexts)


def plain():
    return nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))


def trained(make, out=None, steps=12, around=None, every=1):
    """Train; return the weights, and what `around` was given at the last step."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = None
    if out is not None:
        collect = {"activations": {"every": every}, "gradients": {"every": 1}}
        monitor = trainsentry.TrainMonitor({"output_dir": str(out), "collect": collect}).watch(model, optimizer)
    seen = []
    for _ in range(steps):
        x = torch.randn(4, 8)
        with around() if around is not None else torch.enable_grad() as mode:
            loss = (model(x) - x).square().mean()
            loss.backward()
        seen.append(mode)
        optimizer.step()
        optimizer.zero_grad()
    if monitor is not None:
        monitor.close()
        assert monitor.incidents == ()
    return [p.detach().clone() for p in model.parameters()], seen


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_selective_checkpoints_bring_back_their_own_results(tmp_path):
    assert equal(trained(Selective)[0], trained(Selective, tmp_path)[0])


def test_flops_are_those_of_the_model(tmp_path):
    flops = partial(FlopCounterMode, display=False)
    counts = [[m.get_total_flops() for m in trained(plain, out, around=flops)[1]] for out in (None, tmp_path)]
    assert counts[0] == counts[1]


class Recorded(TorchDispatchMode):
    """Notes every operation that it sees."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **kwargs or {})


def test_a_dispatch_mode_sees_no_operation_of_the_forward_hooks(tmp_path):
    torch.manual_seed(0)
    model = plain()
    seen = []
    for out in (None, tmp_path):
        monitor = None if out is None else trainsentry.TrainMonitor({"output_dir": str(out)}).watch(model)
        with Recorded() as mode:
            model(torch.ones(4, 8))
        seen.append(mode.names)
        if monitor is not None:
            monitor.close()
    assert seen[0] == seen[1]


class OwnFunctions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


def test_a_default_device_changes_no_operation_and_a_mode_of_the_users_may():
    assert not active_modes.changes_operations()
    with torch.device("cpu"):
        assert not active_modes.changes_operations()
        with OwnFunctions():
            assert active_modes.changes_operations()
    with Recorded():
        assert active_modes.changes_operations()


def test_a_watched_model_can_be_traced_at_any_step(tmp_path):
    torch.manual_seed(0)
    model, x = plain(), torch.ones(4, 8)
    with trainsentry.TrainMonitor({"output_dir": str(tmp_path)}).watch(model):
        traced = torch.jit.trace(model, x)
    assert torch.equal(traced(x), model(x))


def test_a_hook_that_a_tool_has_moved_without_its_keywords_does_nothing(tmp_path):
    model = plain()
    with trainsentry.TrainMonitor({"output_dir": str(tmp_path)}).watch(model):
        [before], [after] = model._forward_pre_hooks.values(), model._forward_hooks.values()
        other = nn.Identity()
        other.register_forward_pre_hook(before)
        other.register_forward_hook(after)
        assert torch.equal(other(torch.ones(2)), torch.ones(2))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_an_input_with_a_hook_is_saved_without_a_warning(tmp_path, copied):
    model, x = plain(), torch.ones(4, 8, requires_grad=True)
    collect = {"activations": {"every": 1}}
    with trainsentry.TrainMonitor({"output_dir": str(tmp_path), "collect": collect}).watch(model):
        model(x)
        assert torch.equal(copied(x), x)


def test_a_default_device_without_memory_does_not_stop_the_monitor(tmp_path):
    model = plain()
    torch.set_default_device("meta")
    try:
        monitor = trainsentry.TrainMonitor({"output_dir": str(tmp_path)}).watch(model)
        model(torch.ones(4, 8, device="cpu")).sum().backward()
        monitor.step()
        monitor.close()
    finally:
        torch.set_default_device(None)
    assert len(monitor.records(last=1))


class RoundedProducts(TorchDispatchMode):
    """A quantisation that is switched on in the midst of a run."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **kwargs or {})
        return (found * 256).round() / 256 if func in MATMULS else found


def test_a_mode_that_computes_something_else_is_no_faulty_device(tmp_path):
    torch.manual_seed(0)
    model = plain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {"output_dir": str(tmp_path), "collect": {"activations": {"every": 1}}}
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        for step in range(24):
            x = torch.randn(4, 8)
            with RoundedProducts() if step >= 14 else torch.enable_grad():
                (model(x) - x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [i.kind for i in monitor.incidents if i.kind == "arithmetic"] == []
