"""The profiler counts no operation of the monitor on unsampled steps, and few on sampled ones."""

from collections import Counter

import pytest
import torch
from tiny_models import EVERY_STEP, Gpt
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import trainsentry
from trainsentry.collectors.series import SeriesTable
from trainsentry.collectors.torch import watch
from trainsentry.collectors.torch.rows import host_statistics, step_rows
from trainsentry.collectors.torch.rows.step_rows import StepRows

NOTHING = dict.fromkeys(
    ("gradients", "parameters", "optimizer_state", "updates", "activations", "communication"), False
)


def one_step(model, optimizer, tokens):
    logits = model(tokens)
    F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def operations(collect=None, skip=3, out=None):
    """Return the operations of one step, counted by name, with those inside operators of ours."""
    torch.manual_seed(0)
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(0, 64, (2, 8))
    monitor = None
    if collect is not None:
        monitor = trainsentry.TrainMonitor({"output_dir": str(out), "collect": collect, "strict": True})
        monitor.watch(model, optimizer)
    for _ in range(skip):
        one_step(model, optimizer, tokens)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        one_step(model, optimizer, tokens)
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    if monitor is not None:
        monitor.close()
    names = Counter(e.name for e in profiled.events() if e.name.startswith(("aten::", "trainsentry::")))
    return names, hooks


def only(part):
    return {**NOTHING, part: {"every": 1, **({"recompute": False} if part == "activations" else {})}}


def test_a_step_without_samples_reads_the_models_input_alone(out):
    bare, _ = operations()
    every_fifth = {part: {"every": 5} for part in EVERY_STEP}
    watched, hooks = operations(collect=every_fifth, skip=3, out=out)
    number = {"aten::to", "aten::_to_copy", "aten::empty_strided", "aten::copy_"}  # tokens become numbers
    assert set(watched - bare) <= number | {"aten::resolve_neg", "aten::detach", "detach"}
    assert max((watched - bare).values()) == 1
    assert hooks == 2, "before and after the root"


def test_a_step_without_samples_has_no_operation_and_no_hook_of_ours(out):
    bare, _ = operations()
    every_fifth = {part: {"every": 5} for part in EVERY_STEP}
    every_fifth["activations"]["inputs"] = False
    watched, hooks = operations(collect=every_fifth, skip=3, out=out)  # step 3; 4 is not sampled either
    assert watched == bare
    assert hooks == 0


@pytest.mark.parametrize("part", ["gradients", "parameters", "optimizer_state"])
def test_what_the_kernel_reads_on_the_cpu_takes_no_operation_at_all(part, out):
    bare, _ = operations()
    watched, _ = operations(collect=only(part), out=out)
    assert watched == bare


def test_activations_on_the_cpu_take_an_operation_only_where_integers_become_numbers(out):
    bare, _ = operations()
    watched, _ = operations(collect=only("activations"), out=out)
    extra = watched - bare
    assert set(extra) <= {
        "aten::to",
        "aten::_to_copy",
        "aten::copy_",
        "aten::empty_strided",
        "aten::resolve_neg",
        "aten::detach",
        "detach",
    }
    assert not bare - watched
    assert sum(extra.values()) <= 12  # token numbers, met in two modules


def test_updates_take_two_operations_whatever_the_number_of_weights(out):
    bare, _ = operations()
    extra = operations(collect=only("updates"), out=out)[0] - bare
    assert extra["aten::_foreach_neg"] == 1
    assert extra["aten::_foreach_add_"] == 1


def test_without_a_compiler_an_activation_takes_at_most_8_operations(monkeypatch):
    monkeypatch.setattr(host_statistics, "KINDS", {})
    rows = StepRows(SeriesTable())
    tensor = torch.randn(64, 64, requires_grad=True) * 1.0
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        rows.add(0, tensor)
    top = [e.name for e in profiled.events() if e.name.startswith("aten::") and e.cpu_parent is None]
    assert 0 < len(top) <= 8, top


def device_rows(monkeypatch):
    monkeypatch.setattr(watch, "StepRows", lambda *args: step_rows.StepRows(*args, device_rows_on_cpu=True))


def test_hooks_on_device_tensors_never_ask_the_device_for_a_value(out, monkeypatch):
    bare, _ = operations()
    device_rows(monkeypatch)
    watched, _ = operations(collect=EVERY_STEP, out=out)
    for name in ("aten::_local_scalar_dense", "aten::item", "aten::nonzero"):  # the optimizer has some of its own
        assert watched[name] == bare[name]


def test_a_sampled_step_is_copied_to_the_host_once(out, monkeypatch):
    device_rows(monkeypatch)
    copied = []
    copy = step_rows.DeviceRows.copy_to_host
    monkeypatch.setattr(step_rows.DeviceRows, "copy_to_host", lambda self: copied.append(1) or copy(self))
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters())
    config = {"output_dir": str(out), "collect": EVERY_STEP, "on_incident": {"dump": {"same_step": False}}}
    with trainsentry.TrainMonitor(config).watch(model, optimizer):
        for _ in range(4):
            one_step(model, optimizer, torch.randint(0, 64, (2, 8)))
    assert len(copied) == 4
