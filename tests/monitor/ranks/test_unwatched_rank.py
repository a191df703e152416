"""An unwatched rank counts the same steps as the watched ones."""

from types import SimpleNamespace

import pytest

from trainsentry import TrainMonitor
from trainsentry.collectors.guard import Guard
from trainsentry.monitor.ranks.unwatched_rank import UnwatchedRank


class Steps:
    """Optimizers whose calls are seen, or compiled; `adopted_only`: taken over at their first step."""

    def __init__(self, optimizers, *, seen=True, adopted_only=False):
        self.optimizers = optimizers
        self.adopted_only = adopted_only
        self.seen = seen

    def ended_step(self):
        return self.seen and bool(self.optimizers)


@pytest.fixture
def counted():
    return []


def follow(tmp_path, counted, steps):
    """Return a monitor that is not watched here, and its follower."""
    consensus = SimpleNamespace(
        at_boundary=lambda step, proposal: counted.append(step),
        stop_after=lambda *_: None,
        commands=lambda agreed, read: [],
    )
    monitor = TrainMonitor({"output_dir": str(tmp_path)})
    monitor._unwatched_rank = unwatched_rank = UnwatchedRank(consensus, SimpleNamespace(dense=range(0)), Guard(), 0)
    unwatched_rank.follow(steps)
    return monitor, unwatched_rank


def test_optimizers_end_steps(tmp_path, counted):
    optimizers = [object(), object()]
    monitor, unwatched_rank = follow(tmp_path, counted, Steps(optimizers))
    for optimizer in optimizers * 2:
        unwatched_rank.after_optimizer(optimizer)
        monitor.step()
    assert counted == [0, 1]


def test_a_callback_ends_steps_in_their_place_whether_their_calls_are_seen_or_not(tmp_path, counted):
    optimizer = object()
    monitor, unwatched_rank = follow(tmp_path, counted, Steps([optimizer]))
    monitor.ends_at_callback(True)
    for seen in (True, False, True):
        if seen:
            unwatched_rank.after_optimizer(optimizer)
        monitor.step_ended()
    assert counted == [0, 1, 2]
    monitor.ends_at_callback(False)
    unwatched_rank.after_optimizer(optimizer)
    assert counted == [0, 1, 2, 3]


@pytest.mark.parametrize("steps", [Steps([]), Steps([object()], seen=False)])
def test_the_program_marks_steps_that_no_optimizer_tells_of(tmp_path, counted, steps):
    monitor, _ = follow(tmp_path, counted, steps)
    monitor.step()
    monitor.step()
    assert counted == [0, 1]


def test_marks_end_the_steps_from_the_first_one_on_where_optimizers_were_taken_over(tmp_path, counted):
    """As on a watched rank: the first mark after an optimizer's own end of the step adds none."""
    optimizer = object()
    monitor, unwatched_rank = follow(tmp_path, counted, Steps([optimizer], adopted_only=True))
    for _ in range(3):
        unwatched_rank.after_optimizer(optimizer)
        monitor.step()
    assert counted == [0, 1, 2]
