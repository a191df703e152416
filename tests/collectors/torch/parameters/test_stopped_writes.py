"""What was kept up to date and is so no more is noted; what rests by its own rhythm, or is switched off, is not."""

import pytest

from trainsentry.collectors.torch.parameters.stopped_writes import LONGER, STOPPED, WRITTEN_BEFORE, StoppedWrites

STEPS = 2_000
AT = 800


def stops(*tensors):
    """Return which of several tensors stop, when, and after how many updates; each gives its writes at an update."""
    writes = StoppedWrites(len(tensors))
    found = {}
    for update in range(STEPS):
        for place, updates in writes.after([tensor(update) for tensor in tensors]).items():
            found.setdefault(place, []).append((update, updates))
    return found


def until(end, every=1):
    return lambda update: int(update < end and update % every == 0)


def always(_):
    return 1


def test_a_tensor_that_is_written_no_more_is_told_once():
    assert stops(until(AT), always) == {0: [(AT + STOPPED, STOPPED)]}


def test_one_with_a_rhythm_is_told_after_a_longer_rest():
    [[(update, updates)]] = stops(until(AT, every=20), always).values()
    assert updates == LONGER * 19
    assert update - updates == AT - 20 + 1


@pytest.mark.parametrize(
    "tensor",
    [
        always,
        lambda _: 0,
        until(WRITTEN_BEFORE - 1),
        lambda u: int(u % 40 == 0),
        lambda u: int(u % 200 < 100 or u < 100),  # a phase that comes again: its first rest is told
        lambda u: 2 if u < AT else 1,
    ],
)
def test_what_goes_on_or_hardly_began_is_nothing(tensor):
    told = stops(tensor, always)
    assert told == {} or (len(told[0]) == 1 and tensor(150) == 0 and tensor(250) == 1)


@pytest.mark.parametrize("late", [0, 1])
def test_what_stops_as_a_switch_is_thrown_is_by_design(late):
    switch = lambda update: int(update == AT - late)  # noqa: E731
    assert stops(until(AT), until(AT), switch, always) == {}
    busy = lambda update: int(update % 2 == 0)  # noqa: E731
    assert set(stops(until(AT), until(AT), busy, always)) == {0, 1}
