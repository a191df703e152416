"""Weights that an update leaves unwritten are told of at that update, and no value is read for it."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from weight_loop import WeightLoop

from trainsentry.collectors.series import MADE_CONSTANT, SeriesTable
from trainsentry.collectors.statistics import VALUE
from trainsentry.collectors.torch.parameters import weight_writes
from trainsentry.collectors.torch.parameters.weight_writes import WRITTEN_BEFORE, WeightWrites
from trainsentry.collectors.torch.rows.step_rows import StepRows
from trainsentry.collectors.torch.sharding.model_names import ModelNames

OPTIMIZERS = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    lambda p: torch.optim.AdamW(p, foreach=False),
    lambda p: torch.optim.AdamW(p, fused=True),
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    torch.optim.RMSprop,
    torch.optim.Adafactor,
    torch.optim.Rprop,
]


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch):
    """Other tests of this process compile."""
    monkeypatch.setattr(weight_writes, "has_compiled", lambda: False)


def make_loop(make=OPTIMIZERS[0]):
    return WeightLoop(make)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_an_optimizer_that_writes_is_never_told_of(make):
    loop = make_loop(make)
    assert [loop.step() for _ in range(30)] == [{}] * 30


COUNTED = pytest.mark.parametrize("make", [OPTIMIZERS[0], OPTIMIZERS[2]], ids=["foreach", "fused"])
"""torch counts the writes of a fused optimizer in its own `step` of each weight alone."""


@COUNTED
def test_an_update_that_writes_nothing_is_told_of_once(make):
    loop = make_loop(make)
    assert not any(loop.step() for _ in range(WRITTEN_BEFORE + 2))
    assert loop.step(updates=False) == {"unwritten": 1.0}
    assert not any(loop.step(updates=False) for _ in range(20))
    assert not any(loop.step() for _ in range(20))


def test_a_fused_optimizer_that_loses_its_state_in_a_step_is_not_told_of():
    loop = make_loop(OPTIMIZERS[2])
    for _ in range(20):
        loop.step()
    handle = loop.optimizer.register_step_post_hook(lambda optimizer, *_: optimizer.state.clear())
    assert loop.step() == {}
    handle.remove()
    assert [loop.step() for _ in range(5)] == [{}] * 5


@COUNTED
def test_a_weight_that_was_frozen_is_named_and_one_without_a_gradient_may_rest(make):
    loop = make_loop(make)
    for _ in range(20):
        loop.step()
    loop.model[0].requires_grad_(False)
    assert loop.step() == {"unwritten.0.weight": 2.0, "unwritten.0.bias": 2.0}
    loop.model[2].bias.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    assert loop.step() == {}, "an expert may have no tokens"


def test_layers_that_are_frozen_in_turns_are_told_of_once():
    loop, told = make_loop(), []
    for i in range(120):
        if i % 20 == 15:
            loop.model[0].requires_grad_(i % 40 != 15)
        told.append(loop.step())
    assert [i for i, each in enumerate(told) if each] == [15]


def test_a_weight_that_the_optimizer_passes_over_is_named():
    loop = make_loop()
    for _ in range(20):
        loop.step()
    group = loop.optimizer.param_groups[0]
    passed_over = group["params"][-1]
    original = loop.optimizer.step
    kept = passed_over.detach().clone()

    def step():
        gradient, passed_over.grad = passed_over.grad, None
        original()
        passed_over.grad = gradient

    loop.optimizer.step = step
    assert loop.step() == {"unwritten.2.bias": 1.0}
    assert torch.equal(passed_over, kept)


def test_optimizers_that_write_past_the_count_or_now_and_then_are_left_alone():
    past_the_count, now_and_then = make_loop(), make_loop()

    def write():
        for p in past_the_count.model.parameters():
            p.data.add_(p.grad, alpha=-0.1)

    past_the_count.optimizer.step = write
    assert not any(past_the_count.step() for _ in range(30))
    assert not any(now_and_then.step(updates=i % WRITTEN_BEFORE == 0) for i in range(60))


def test_a_head_that_rests_and_what_the_loop_writes_are_no_fault():
    loop = make_loop()
    for _ in range(20):
        loop.step()
    assert loop.step(backward=False) == {}, "no loss reached these weights in this step"
    past_the_count = make_loop()

    def write():
        for p in past_the_count.model.parameters():
            p.data.add_(p.grad, alpha=-0.1)

    past_the_count.optimizer.step = write
    for step in range(40):
        assert past_the_count.step() == {}
        with torch.no_grad():
            for p in past_the_count.model.parameters() if step < 20 else ():
                p.clamp_(-1, 1)


def test_weights_that_the_model_has_replaced_are_told_of():
    loop = make_loop()
    for _ in range(20):
        loop.step()
    for module in (loop.model[0], loop.model[2]):
        for name, p in list(module.named_parameters()):
            setattr(module, name, nn.Parameter(p.detach().clone()))
    assert loop.step() == {"unwritten": 1.0}


def test_most_of_a_model_frozen_at_once_is_a_decision():
    loop = make_loop()
    for _ in range(20):
        loop.step()
    loop.model[0].requires_grad_(False)
    loop.model[2].bias.requires_grad_(False)
    assert loop.step() == {"unwritten": 3.0}
    assert loop.step() == {}


def test_beside_compiled_code_nothing_is_told(monkeypatch):
    loop = make_loop()
    for _ in range(20):
        loop.step()
    monkeypatch.setattr(weight_writes, "has_compiled", lambda: True)
    assert loop.step(updates=False) == {}
    monkeypatch.setattr(weight_writes, "has_compiled", lambda: False)
    assert loop.step(updates=False) == {}, "what was known is forgotten"


class _Patches(nn.Module):
    """Has a table of positions that its author has made without a gradient, as MAE has (He et al., CVPR 2022)."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.pos_embed = nn.Parameter(torch.ones(4), requires_grad=False)
        self.learned = nn.Parameter(torch.ones(4))
        self.rest = nn.ModuleList(nn.Linear(4, 4) for _ in range(16))
        self.table = nn.Embedding(4, 4).requires_grad_(False)
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.head.parametrizations.weight.original0.requires_grad_(False)  # as in DINO (Caron et al., ICCV 2021)


@pytest.mark.parametrize("frozen", [False, True])
def test_constants_of_a_modules_author_are_told_and_frozen_layers_are_not(frozen):
    model, names, table = _Patches(), ModelNames(), SeriesTable()
    model.requires_grad_(False) if frozen else None
    names.add([model], [])
    rows = StepRows(table, 0.0)
    WeightWrites(rows, model.parameters).tell_constants(names.parameters, names.modules)
    taken = rows.take()
    told = {table.series[i].name: float(v[VALUE]) for i, v in zip(taken.ids, taken.values, strict=True)}
    own = ["unwritten.pos_embed", "unwritten.head.parametrizations.weight.original0"]
    own += ["unwritten.learned", "unwritten.head.parametrizations.weight.original1"] * frozen
    assert told == dict.fromkeys(own, MADE_CONSTANT)


def test_counters_that_somebody_replaced_are_looked_up_again():
    """A fused optimizer counts in its state, whose entries a program may exchange; the old ones stand still."""
    loop = make_loop(lambda p: torch.optim.AdamW(p, fused=True))
    for step in range(WRITTEN_BEFORE + 12):
        if step == WRITTEN_BEFORE + 4:
            state = loop.optimizer.state
            for parameter in list(state):
                state[parameter] = {key: value.clone() for key, value in state[parameter].items()}
        assert loop.step() == {}
    assert loop.step(updates=False) != {}


def test_a_state_that_a_checkpoint_replaced_is_not_kept_in_memory():
    loop = make_loop(lambda p: torch.optim.AdamW(p, fused=True))
    for _ in range(3):
        loop.step()
    old = [weakref.ref(entry["exp_avg"]) for entry in loop.optimizer.state.values()]
    loop.optimizer.load_state_dict(copy.deepcopy(loop.optimizer.state_dict()))
    gc.collect()
    assert [reference() for reference in old] == [None] * len(old)
