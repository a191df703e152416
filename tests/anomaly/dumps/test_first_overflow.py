"""The first NaN or Inf among many ranks is traced through the collectives that carried it."""

import math
from types import SimpleNamespace

from trainsentry.anomaly.dumps.first_overflow import first_overflows


def dump(rank, *calls):
    """Make a dump of calls `(name, what goes in, what comes out)`."""
    entries = {name: {} for name, _, _ in calls}
    by_name = {
        name: [
            SimpleNamespace(place="input.0", facts={"Max": into, "Min": into}),
            SimpleNamespace(place="output.0", facts={"Max": out, "Min": out}),
        ]
        for name, into, out in calls
    }
    return SimpleNamespace(rank=rank, calls=entries, tensors=by_name.__getitem__, parents={})


NAN = math.nan


def test_a_collective_brings_it_from_the_rank_that_made_it():
    healthy = dump(0, ("Torch.a.0.forward", 1.0, 1.0), ("Distributed.all_reduce.0.forward", 1.0, NAN))
    culprit = dump(1, ("Torch.a.0.forward", 1.0, NAN), ("Distributed.all_reduce.0.forward", NAN, NAN))
    for dumps in ([healthy, culprit], [culprit, healthy]):
        first, second = first_overflows(dumps)
        assert (first.rank, first.call, first.made) == (1, "Torch.a.0.forward", True)
        assert (second.rank, second.from_ranks) == (0, (1,))


def test_of_two_that_made_one_the_one_before_the_earlier_collective_is_first():
    reduce = ("Distributed.all_reduce.0.forward", 1.0, 1.0)
    later = dump(0, reduce, ("Torch.a.0.forward", 1.0, math.inf))
    earlier = dump(1, ("Torch.b.0.forward", 1.0, math.inf), reduce)
    assert [o.rank for o in first_overflows([later, earlier])] == [1, 0]


def test_a_dump_of_overflowing_calls_alone_has_its_collectives_in_the_tree():
    later = dump(0, ("Torch.a.0.forward", 1.0, math.inf))
    later.parents = {"Distributed.all_reduce.0.forward": None, "Torch.a.0.forward": None}
    earlier = dump(1, ("Torch.b.0.forward", 1.0, math.inf))
    earlier.parents = {"Torch.b.0.forward": None, "Distributed.all_reduce.0.forward": None}
    assert [o.rank for o in first_overflows([later, earlier])] == [1, 0]


def test_what_the_check_has_judged_counts_whatever_the_values_say():
    found = dump(0, ("Torch.log.0.forward", 0.0, -math.inf))
    found.calls["Torch.log.0.forward"] = {"overflow": "made"}
    assert [o.call for o in first_overflows([found])] == ["Torch.log.0.forward"]


def test_what_came_in_bad_was_not_made_here():
    [found] = first_overflows([dump(0, ("Torch.a.0.forward", NAN, NAN))])
    assert not found.made


def test_healthy_ranks_have_none_and_masks_do_not_count():
    assert first_overflows([dump(0, ("Torch.a.0.forward", 1.0, -math.inf), ("Torch.b.0.forward", 1.0, 2.0))]) != []
    mask = dump(0)
    mask.calls["Torch.a.0.forward"] = {}
    facts = {"Max": 0.0, "Min": -math.inf}
    mask.tensors = lambda _: [SimpleNamespace(place="output.0", facts=facts)]
    assert first_overflows([mask]) == []
