"""Rules that compare ranks: what they find, and what they leave alone."""

import json
import random

import pytest

from trainsentry.anomaly.across_ranks.collective_call import MOST_OUTPUTS, CollectiveCall, Sums, put_together, seen_by
from trainsentry.anomaly.across_ranks.conservation import UNKNOWN, LearnedReductions, judge
from trainsentry.anomaly.across_ranks.peers import PeerRule, Told
from trainsentry.anomaly.across_ranks.replicas import ReplicaRule, ReplicasOfStep
from trainsentry.anomaly.incidents.sentence import evidence
from trainsentry.collectors.series import Series

WEIGHT = Series("w", "parameter")


def sums(total, norm=10.0, dtype="float32", finite=True):
    return Sums(total, norm, 100, finite, dtype)


def parts_of(op, inputs, outputs, reductions, name="c"):
    sides = zip(inputs, outputs, strict=True)
    return [seen_by(rank, name, op, side, 0, reductions[rank]) for rank, side in enumerate(sides)]


def call(op, inputs, outputs, reduction=1, name="c"):
    return put_together(parts_of(op, inputs, outputs, [reduction] * len(inputs), name))


@pytest.mark.parametrize(
    ("op", "outputs", "reduction", "bad"),
    [
        ("all_reduce", [3.0, 3.0], 1, []),
        ("all_reduce", [1.5, 1.5], 2, []),
        ("all_reduce", [3.0, 0.0], 1, [1]),
        ("all_reduce", [3.0, 3.0], 2, [0, 1]),
        ("all_reduce", [9.0, 9.0], 0, []),
        ("reduce_scatter_tensor", [1.0, 2.0], 1, []),
        ("reduce_scatter_tensor", [1.0, 1.0], 1, [0]),
        ("all_gather", [3.0, 3.0], 0, []),
        ("all_gather", [3.0, 1.0], 0, [1]),
        ("all_to_all_single", [0.5, 2.5], 0, []),
        ("all_to_all_single", [0.5, 0.5], 0, [0]),
        ("broadcast", [2.0, 2.0], 0, []),
        ("broadcast", [2.0, 0.0], 0, [1]),
        ("gather", [7.0, 7.0], 0, []),
    ],
)
def test_what_collectives_conserve(op, outputs, reduction, bad):
    found = judge(5, call(op, [sums(1.0), sums(2.0)], [sums(x) for x in outputs], reduction))
    assert [a.rank for a in found] == bad


def test_ranks_that_ask_for_other_reductions_are_at_other_calls_whatever_comes_out():
    fits = [sums(3.0), sums(3.0), sums(3.0)]
    [found] = judge(5, put_together(parts_of("all_reduce", [sums(1.0)] * 3, fits, [1, 1, 0])))
    assert (found.rank, found.statistic, found.value, found.expected) == (2, "reduction", 1.0, 2.0)
    assert "rank 2 calls c with another reduction than other ranks at step 5" in evidence(found)
    tie = put_together(parts_of("all_reduce", [sums(1.0)] * 2, fits[:2], [0, 1])[::-1])
    assert [a.rank for a in judge(5, tie)] == [1]


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter_tensor", "all_gather", "all_to_all_single", "broadcast"])
@pytest.mark.parametrize("wrong", [0.0, 7.0])
def test_a_call_put_together_in_parts_is_judged_as_one_that_comes_whole(op, wrong):
    ranks = 40
    inputs = [sums(2.0 if op == "broadcast" else float(r)) for r in range(ranks)]
    total = sum(s.total for s in inputs)
    each = {"broadcast": 2.0, "all_reduce": total, "all_gather": total}.get(op, total / ranks)
    outputs = [sums(each + wrong * (r in {3, 29})) for r in range(ranks)]
    parts = parts_of(op, inputs, outputs, [1] * ranks)
    whole = put_together(parts)
    hosts = [put_together(parts[i : i + 8]) for i in range(0, ranks, 8)]
    carried = [CollectiveCall.from_json(json.loads(json.dumps(h.to_json()))) for h in hosts]
    found = judge(5, put_together([put_together(carried[2:]), *carried[:2]]))
    assert found == judge(5, whole)
    named = [0] if op in {"reduce_scatter_tensor", "all_to_all_single"} else [3, 29]
    assert [a.rank for a in found] == (named if wrong else [])


def test_a_call_of_thousands_of_ranks_takes_the_room_of_a_few():
    parts = parts_of("all_reduce", [sums(1.0)] * 4096, [sums(float(r)) for r in range(4096)], [1] * 4096)
    whole = put_together(parts)
    assert len(json.dumps(whole.to_json())) < 3000
    assert {o.places[0][0] for o in whole.outputs} >= {0, 4095}, "the farthest apart are kept"
    assert len(whole.outputs) == MOST_OUTPUTS


def test_a_reduction_that_a_history_does_not_name_is_learned_from_its_results():
    learned = LearnedReductions()
    added, averaged = [sums(3.0)] * 2, [sums(1.5)] * 2
    for name, outputs, bad in (("sum", added, averaged), ("mean", averaged, added)):
        inputs = [sums(1.0), sums(2.0)]
        known = [call("all_reduce", inputs, outputs, UNKNOWN, name)] * 4
        assert [judge(5, learned.named(c)) for c in known] == [[]] * 4
        assert len(judge(5, learned.named(call("all_reduce", inputs, bad, UNKNOWN, name)))) == 2
    other = call("all_reduce", [sums(1.0), sums(2.0)], [sums(9.0)] * 2, UNKNOWN, "max")
    assert [judge(5, learned.named(other)) for _ in range(9)] == [[]] * 9, "what is neither is not judged"


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "complex64"])
def test_sums_of_flags_and_of_small_whole_numbers_are_not_judged(dtype):
    inputs = [sums(200.0, dtype=dtype)] * 2
    assert judge(5, call("all_reduce", inputs, [sums(144.0, dtype=dtype)] * 2)) == []


def test_what_is_not_finite_is_not_judged():
    assert judge(5, call("all_reduce", [sums(1.0), sums(0.0, finite=False)], [sums(7.0)] * 2)) == []


def test_replicas_part_once_they_have_changed_together():
    rule = ReplicaRule()
    for step, value in enumerate([11, 12, 12]):
        assert rule.judge(step, [], {1: value}) == []
    found = rule.judge(3, [ReplicasOfStep(1, WEIGHT, {0: 5, 1: 5, 2: 6})], {})
    assert [(a.rank, a.last_clean, a.value, a.expected) for a in found] == [(2, 2, 1.0, 2.0)]
    assert rule.judge(4, [ReplicasOfStep(1, WEIGHT, {0: 7, 1: 7, 2: 8})], {}) == [], "each once"


@pytest.mark.parametrize("equal", [[], [11], [11, 11, 11]])
def test_equal_seeds_and_what_never_changes_make_no_replicas(equal):
    rule = ReplicaRule()
    for step, value in enumerate(equal):
        rule.judge(step, [], {1: value})
    assert rule.judge(9, [ReplicasOfStep(1, WEIGHT, {0: 5, 1: 6})], {}) == []
    assert rule.stranger_names == {("w", 0)}


@pytest.mark.parametrize(
    ("numbers", "named"),
    [((7, 7, 7), []), ((7, 7, 9), [2]), ((9, 7, 7), [0]), ((7, 9, 8), [0, 1, 2]), ((7, None, 9), [0, 2])],
)
def test_a_rank_that_calls_something_else_for_once_is_named_where_all_were_alike_before(numbers, named):
    rule = PeerRule()

    def judged(step, numbers):
        return rule.judge(step, {r: Told(order=n) for r, n in enumerate(numbers)}, frozenset())

    assert judged(0, numbers) == []
    assert not [a for step in range(1, 20) for a in judged(step, (step, step, step))]
    assert [(a.rank, a.kind, a.step) for a in judged(20, numbers)] == [(r, "communication_mismatch", 20) for r in named]
    assert judged(21, numbers) == [], "what lasts is said once"


def test_ranks_with_work_of_their_own_are_left_alone():
    rule = PeerRule()
    for step in range(100):
        assert rule.judge(step, {r: Told(order=r + step % 15) for r in range(3)}, frozenset()) == []


def test_losses_of_small_batches_raise_no_alarm():
    rule, choice = PeerRule(), random.Random(0)
    for step in range(3000):
        told = {rank: Told(loss=choice.lognormvariate(0, 0.8)) for rank in range(8)}
        assert rule.judge(step, told, frozenset()) == []


def test_a_rank_with_harder_data_from_the_start_is_not_at_fault():
    rule = PeerRule()
    for step in range(200):
        assert rule.judge(step, {0: Told(loss=1.0), 1: Told(loss=1.1), 2: Told(loss=9.0)}, frozenset()) == []


def test_chance_matches_of_data_are_forgotten():
    rule, both = PeerRule(), frozenset({0, 1})
    for step in range(200):
        same = step % 20 == 0
        told = {0: Told(data=float(step)), 1: Told(data=float(step) if same else -1.0 - step)}
        assert rule.judge(step, told, both) == []
    assert rule.judge(0, {0: Told(data=5.0), 1: Told(data=5.0)}, frozenset()) == []
