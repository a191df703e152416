"""Listeners before any optimizer's step come and go at any time, and harm no training."""

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

from trainsentry.collectors.torch.hooks.any_step import before_any_step


@pytest.fixture
def optimizer():
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    return torch.optim.SGD([weight], lr=0.1)


def test_a_listener_may_end_itself_and_begin_another_inside_a_step(optimizer):
    told = []
    users = register_optimizer_step_pre_hook(lambda *_: told.append("user"))

    def once(_):
        told.append("once")
        first.remove()
        handles.append(before_any_step(lambda _: told.append("later")))

    handles = []
    first = before_any_step(once)
    after = register_optimizer_step_pre_hook(lambda *_: told.append("after"))
    optimizer.step()
    optimizer.step()
    for handle in (users, after, *handles):
        handle.remove()
    assert told == ["user", "once", "after", "user", "later", "after"]
    assert not _global_optimizer_pre_hooks


def test_the_last_listener_that_ends_inside_a_step_harms_nothing_and_the_hook_goes_with_the_next(optimizer):
    handle = before_any_step(lambda _: handle.remove())
    after = register_optimizer_step_pre_hook(lambda *_: None)
    optimizer.step()
    after.remove()
    before_any_step(lambda _: None).remove()
    assert not _global_optimizer_pre_hooks
