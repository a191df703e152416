"""A gradient that something writes to more often than to the others is told, by counts alone."""

import pytest
import torch
from torch import nn

from trainsentry.collectors.series import LASTING_WRITES, LOOKED_AT_EVERY
from trainsentry.collectors.torch.parameters.gradient_versions import MOST_AT_ONCE, GradientVersions
from trainsentry.collectors.torch.parameters.outside_writes import LEARNED

BEFORE = LEARNED + 10


class Loop:
    """Trains a model whose gradients are clipped, and may be written to once more."""

    def __init__(self, *, ties=False):
        torch.manual_seed(0)
        self.model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
        if ties:
            self.model[3].weight = self.model[0].weight
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.versions = GradientVersions()

    def step(self, write=lambda _: None, *, micro_steps=1):
        """Train a step; return the names of the parameters that are told, and how many times more."""
        for _ in range(micro_steps):
            self.model(torch.randn(3, 4)).square().mean().backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        with torch.no_grad():
            write(self.model)
        names = {p: name for name, p in self.model.named_parameters()}
        found = {names[p]: more for p, more in self.versions.read(self.optimizer)}
        self.optimizer.step()
        self.optimizer.zero_grad()
        return found


def negate(model):
    model[1].weight.grad.neg_()


def exchange(model):
    first, second = model[1].weight.grad, model[2].weight.grad
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)


def often(model):
    for _ in range(3):
        negate(model)


@pytest.mark.parametrize(
    ("write", "told"), [(negate, {"1.weight": 1}), (exchange, {"1.weight": 1, "2.weight": 1}), (often, {"1.weight": 3})]
)
def test_what_is_written_after_the_backward_pass_is_told_once(write, told):
    loop = Loop()
    assert not any(loop.step() for _ in range(BEFORE))
    found = [f for _ in range(LASTING_WRITES + 2 * LOOKED_AT_EVERY) if (f := loop.step(write))]
    assert found == [dict.fromkeys(told, 0), told]


def test_what_the_loop_writes_to_all_or_to_many_is_its_own():
    loop = Loop()
    assert not any(loop.step(micro_steps=1 + i % 3) for i in range(BEFORE))
    many = list(loop.model.parameters())[: int(8 * MOST_AT_ONCE) + 1]
    assert not any(loop.step(lambda _: [p.grad.mul_(0.9) for p in many]) for _ in range(20))


def test_what_was_so_from_the_beginning_is_no_finding():
    loop = Loop()
    assert not any(loop.step(negate) for _ in range(3 * BEFORE))


def test_writes_now_and_then_are_none():
    """A layer that is clipped by itself where its gradient is large."""
    loop = Loop()
    told = [loop.step(negate if i > BEFORE and i % 9 < 5 else lambda _: None) for i in range(4 * BEFORE)]
    assert [f for f in told if f] == [{"1.weight": 0}]


def test_a_weight_that_is_used_more_often_in_a_pass_is_written_by_autograd():
    """As the cell of a decoder whose sequences become longer."""
    loop = Loop()
    assert not any(loop.step() for _ in range(BEFORE))
    plain = loop.model[1].forward
    loop.model[1].forward = lambda x: plain(plain(plain(plain(x))))
    told = [f for _ in range(40) if (f := loop.step())]
    assert told, "the counts say so"
    assert not any(more for found in told for more in found.values())
    assert loop.versions.after_backward is None
    assert not loop.model[1].weight._post_accumulate_grad_hooks


def test_tied_weights_and_gradients_that_are_not_there_are_none():
    loop = Loop(ties=True)
    loop.model[2].bias.requires_grad_(False)
    assert not any(loop.step() for _ in range(BEFORE))
    loop.model[2].bias.requires_grad_(True)
    assert not any(loop.step() for _ in range(BEFORE))


def test_an_optimizer_that_takes_in_parameters_is_learned_anew():
    loop = Loop()
    assert not any(loop.step() for _ in range(BEFORE))
    loop.model.append(nn.Linear(4, 4))
    loop.optimizer.add_param_group({"params": loop.model[4].parameters()})
    assert not any(loop.step(negate) for _ in range(LEARNED))


def test_reading_takes_no_operation():
    loop = Loop()
    loop.step()
    loop.model(torch.randn(3, 4)).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        for _ in range(LOOKED_AT_EVERY):
            loop.versions.read(loop.optimizer)
    assert [event.key for event in seen.key_averages() if event.key.startswith("aten::")] == []
