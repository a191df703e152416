"""The monitor measures its cost and keeps to a budget by sampling less often; tests turn the clock."""

import functools
import json
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import EVERY_STEP, mlp, train
from watched import STEPS, status
from written_files import json_lines, scalars

import trainsentry
from trainsentry.collectors import guard
from trainsentry.collectors.settings import PARTS
from trainsentry.collectors.torch.watch import TorchWatch
from trainsentry.monitor.trainer import overhead
from trainsentry.monitor.trainer.budget import LONGEST, Budget


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def nanoseconds(self):
        return round(self.now * 1e9)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(guard, "perf_counter_ns", clock.nanoseconds)
    monkeypatch.setattr(overhead, "Cost", functools.partial(overhead.Cost, clock=clock))
    return clock


@pytest.fixture
def slow(monkeypatch, clock):
    """A collector of gradients that takes `slow["seconds"]`."""
    seconds = {"seconds": 0.0}
    read = TorchWatch._read_gradients

    def read_slowly(self, optimizer):
        if "gradients" in self._plan:
            clock.now += seconds["seconds"]
        read(self, optimizer)

    monkeypatch.setattr(TorchWatch, "_read_gradients", read_slowly)
    return seconds


def run(monitor, model, optimizer, clock, steps, step_seconds=0.1):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        clock.now += step_seconds
        optimizer.step()


def start(out, **config):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = trainsentry.TrainMonitor({"output_dir": str(out), "strict": True, **config}).watch(model, optimizer)
    return monitor, model, optimizer


def test_the_cost_is_measured_and_shown(out, clock, slow, capsys):
    slow["seconds"] = 0.02
    monitor, model, optimizer = start(out, export={"tensorboard": True})
    run(monitor, model, optimizer, clock, 11)
    monitor.close()
    status = json.loads((out / "rank0" / "status.json").read_text())
    told = status["cost"]
    assert told["share"] == pytest.approx(0.2)
    assert told["recent_share"] == pytest.approx(0.2)
    assert told["seconds_a_step"] == pytest.approx(0.02)
    assert told["seconds_by_part"]["gradients"] == pytest.approx(0.2)  # the first step's start is unknown
    assert told["seconds_by_part"]["everything else"] == pytest.approx(0.0, abs=1e-6)
    assert sum(told["seconds_by_part"].values()) == pytest.approx(told["host_seconds"])
    said = capsys.readouterr().err
    assert "11 steps watched, 0 incidents; the monitor added" in said
    assert re.search(r"and its recorder used \d+\.\d s of processor time beside it", said)
    assert status["recorder_seconds"] > 0
    assert scalars(out / "tensorboard" / "rank0")["scalars/monitor_share"][-1][1] == pytest.approx(0.2)


def test_a_budget_is_kept_within_50_steps_and_sampling_widens_again(out, clock, slow):
    slow["seconds"] = 0.02
    monitor, model, optimizer = start(out, overhead_budget=0.01, detect=False)
    loop = monitor._loop
    run(monitor, model, optimizer, clock, 50)
    assert loop.schedule.stretched == {**dict.fromkeys(PARTS, 10), "gradients": 32}  # 0.02 / 32 <= 0.01 x 0.1
    before = loop.overhead.cost.added
    run(monitor, model, optimizer, clock, 64)
    assert (loop.overhead.cost.added - before) / (64 * 0.1) <= 0.01
    slow["seconds"] = 0.0
    run(monitor, model, optimizer, clock, 150)
    assert loop.schedule.stretched["gradients"] == 1
    monitor.close()
    told = json_lines(out / "rank0" / "sampling.jsonl")
    assert told[0]["every"]["gradients"] == 1
    assert [line["every"]["gradients"] for line in told][-1] == 1
    assert max(line["every"]["gradients"] for line in told) == 32


def test_what_was_sampled_can_be_read_from_the_record(out, clock, slow):
    slow["seconds"] = 0.02
    monitor, model, optimizer = start(out, overhead_budget=0.01, detect=False)
    run(monitor, model, optimizer, clock, 100)
    sampled = set(monitor.records().query("quantity == 'gradient'").step)
    monitor.close()
    told = json_lines(out / "rank0" / "sampling.jsonl")
    for step in range(100):
        every = [line for line in told if line["step"] <= step][-1]["every"]["gradients"]
        assert (step in sampled) == (step % every == 0), step


def test_without_a_budget_nothing_is_thinned_out(out, clock, slow):
    slow["seconds"] = 1.0
    monitor, model, optimizer = start(out, collect=EVERY_STEP)
    run(monitor, model, optimizer, clock, 10)
    assert set(monitor.records().query("quantity == 'gradient'").step) == set(range(10))
    monitor.close()


@given(
    costs=st.lists(st.floats(1e-6, 10.0), min_size=3, max_size=3),
    every=st.lists(st.sampled_from([1, 2, 10]), min_size=3, max_size=3),
    bare=st.floats(1e-3, 10.0),
    share=st.floats(0.001, 0.5),
)
@settings(max_examples=200, deadline=None)
def test_any_costs_end_inside_the_budget_with_no_more_thinning_than_needed(costs, every, bare, share):
    names = ("a", "b", "c")
    budget = Budget(share, dict(zip(names, every, strict=True)))
    cost_of = dict(zip(names, costs, strict=True))
    for step in range(60):
        plan = frozenset(n for n in names if step % (budget.every[n] * budget.stretch[n]) == 0)
        budget.note(plan, bare, sum(cost_of[n] for n in plan), {n: cost_of[n] for n in plan})
        budget.decide(budget.measured())
    average = sum(cost_of[n] / (budget.every[n] * budget.stretch[n]) for n in names)
    at_limit = all(budget.every[n] * budget.stretch[n] * 2 > LONGEST for n in names)
    assert average <= share * bare * (1 + 1e-9) or at_limit
    if sum(cost_of[n] / budget.every[n] for n in names) <= 0.8 * share * bare:
        assert set(budget.stretch.values()) == {1}


def test_one_slow_sample_among_quick_ones_does_not_thin_out():
    budget = Budget(0.01, {"a": 1})
    for step in range(20):
        seconds = 5.0 if step in {0, 7} else 0.0005
        budget.note(frozenset({"a"}), 0.1, seconds, {"a": seconds})
        budget.decide(budget.measured())
    assert budget.stretch == {"a": 1}


def test_what_a_step_costs_without_samples_is_taken_off_first():
    budget = Budget(0.01, {"a": 2})
    for step in range(20):
        sampled = frozenset({"a"}) if step % (2 * budget.stretch["a"]) == 0 else frozenset()
        parts = {"a": 0.001} if sampled else {}
        budget.note(sampled, 0.1, 0.0009 + 0.001 * len(sampled), parts)
        budget.decide(budget.measured())
    assert 0.001 / (2 * budget.stretch["a"]) <= 0.01 * 0.1 - 0.0009
    assert math.log2(budget.stretch["a"]).is_integer()


def test_cost_is_told_by_the_steps_of_this_start(out):
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = trainsentry.TrainMonitor({"output_dir": str(out)}).watch(model, optimizer, start_step=100_000)
    with monitor:
        train(model, optimizer, STEPS, monitor)
    cost = status(out)["cost"]
    assert cost["seconds_a_step"] == pytest.approx(cost["host_seconds"] / (STEPS - 1))  # the first has no beginning


def test_a_recorder_in_the_trainings_process_claims_no_processor_time_of_its_own(out, in_thread, clock, capsys):
    monitor, model, optimizer = start(out)
    run(monitor, model, optimizer, clock, 11)
    monitor.close()
    said = capsys.readouterr().err
    assert "the monitor added" in said
    assert "of processor time" not in said
    assert status(out)["recorder_seconds"] is None
