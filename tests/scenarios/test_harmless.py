"""With every collector on, training is the same to the bit."""

import random

import numpy as np
import pytest
import torch
from tiny_models import EVERY_STEP, Gpt, ResNet, batch_for, mlp, train

import trainsentry

STEPS = 50
ALL = {
    **EVERY_STEP,
    "gradients": {"every": 1, "per_micro_step": True, "before_reduction": True},
}


def fingerprint(model, optimizers):
    tensors = [*model.state_dict().values()]
    tensors += [t for o in optimizers for s in o.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    return [t.detach().clone() for t in tensors]


def run(make_model, make_optimizers, loop, out):
    """Train bare and watched; return both fingerprints with losses and random states."""
    ends = []
    for watched in (False, True):
        torch.manual_seed(3), np.random.seed(3), random.seed(3)
        model = make_model()
        optimizers = make_optimizers(model)
        monitor = None
        if watched:
            config = {"output_dir": str(out), "strict": True, "collect": ALL, "export": {"tensorboard": True}}
            monitor = trainsentry.TrainMonitor(config).watch(model, optimizers)
        losses = loop(model, optimizers, monitor)
        states = torch.get_rng_state(), np.random.get_state()[1], random.getstate()
        ends.append((losses, fingerprint(model, optimizers), states))
        if monitor is not None:
            assert len(set(monitor.records()["step"])) > 5
            monitor.close()
            assert monitor._guard.failures == {}
    return ends


def assert_same(ends):
    (losses, tensors, states), (other_losses, other_tensors, other_states) = ends
    assert losses == other_losses
    for a, b in zip(tensors, other_tensors, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    assert torch.equal(states[0], other_states[0])
    assert (states[1] == other_states[1]).all()
    assert states[2] == other_states[2]


def plain(model, optimizers, monitor):
    return train(model, optimizers[0], STEPS, monitor).losses


def test_a_gpt_with_dropout_and_tied_weights(out):
    assert_same(run(Gpt, lambda m: [torch.optim.AdamW(m.parameters(), lr=1e-3)], plain, out))


def test_a_resnet_with_in_place_relu(out):
    assert_same(run(ResNet, lambda m: [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9)], plain, out))


def test_several_optimizers(out):
    def loop(model, optimizers, monitor):
        losses = []
        generator = torch.Generator().manual_seed(0)
        for _ in range(STEPS):
            x, y = batch_for(model["a"], generator)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = sum(torch.nn.functional.cross_entropy(model[k](x), y) for k in "ab")
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            losses.append(loss.item())
        return losses

    def optimizers(model):
        return [torch.optim.AdamW(model["a"].parameters()), torch.optim.SGD(model["b"].parameters(), lr=0.1)]

    assert_same(run(lambda: torch.nn.ModuleDict({"a": mlp(), "b": mlp()}), optimizers, loop, out))


@pytest.mark.parametrize("fused", [False, True])
def test_mixed_precision_with_a_scaler_accumulation_and_clipping(out, fused):
    def loop(model, optimizers, monitor):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)
        generator = torch.Generator().manual_seed(0)
        losses = []
        for step in range(STEPS):
            optimizers[0].zero_grad()
            for _ in range(2):
                x, y = batch_for(model, generator)
                with torch.autocast("cpu", torch.bfloat16):
                    loss = torch.nn.functional.cross_entropy(model(x).flatten(0, -2), y) / 2
                if step == 20:
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
            scaler.unscale_(optimizers[0])
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizers[0])
            scaler.update()
            losses.append(loss.item())
        return losses

    assert_same(run(Gpt, lambda m: [torch.optim.AdamW(m.parameters(), lr=1e-3, fused=fused)], loop, out))


def test_a_fault_and_everything_it_sets_off_changes_nothing(out):
    def loop(model, optimizers, monitor):
        def before_step(step):
            if step == 20:
                model.blocks[0].mlp[0].weight.detach()[0, 0] = 1e25

        return train(model, optimizers[0], STEPS, monitor, before_step=before_step).losses

    ends = run(Gpt, lambda m: [torch.optim.AdamW(m.parameters(), lr=1e-3)], loop, out)
    (losses, tensors, _), (other, other_tensors, _) = ends
    assert [repr(x) for x in losses] == [repr(x) for x in other]
    assert all(torch.equal(a.nan_to_num(3.0), b.nan_to_num(3.0)) for a, b in zip(tensors, other_tensors, strict=True))
    assert (out / "dump").exists()
