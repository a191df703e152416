"""Outputs of collectives follow from the inputs of all ranks."""

import json

import numpy as np
import pytest

from trainsentry.anomaly.across_ranks.collective_call import MOST_OUTPUTS, CollectiveCall, Sums, put_together, seen_by
from trainsentry.anomaly.across_ranks.conservation import UNKNOWN, ConservationRule, judge
from trainsentry.anomaly.incidents.sentence import evidence
from trainsentry.collectors.series import COMMUNICATION_INPUT, COMMUNICATION_OUTPUT, Layout, Series
from trainsentry.collectors.statistics import reference
from trainsentry.monitor.recorder.ranks.collective_ledger import Side


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
    rule = ConservationRule()
    added, averaged = [sums(3.0)] * 2, [sums(1.5)] * 2
    for name, outputs, bad in (("sum", added, averaged), ("mean", averaged, added)):
        inputs = [sums(1.0), sums(2.0)]
        known = [call("all_reduce", inputs, outputs, UNKNOWN, name)] * 4
        assert [rule.judge(5, c) for c in known] == [[]] * 4
        assert len(rule.judge(5, call("all_reduce", inputs, bad, UNKNOWN, name))) == 2
    other = call("all_reduce", [sums(1.0), sums(2.0)], [sums(9.0)] * 2, UNKNOWN, "max")
    assert [rule.judge(5, other) for _ in range(9)] == [[]] * 9, "what is neither is not judged"


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "complex64"])
def test_sums_of_flags_and_of_small_whole_numbers_are_not_judged(dtype):
    inputs = [sums(200.0, dtype=dtype)] * 2
    assert judge(5, call("all_reduce", inputs, [sums(144.0, dtype=dtype)] * 2)) == []


def test_what_is_not_finite_is_not_judged():
    assert judge(5, call("all_reduce", [sums(1.0), sums(0.0, finite=False)], [sums(7.0)] * 2)) == []


def gathered(dtype, wrong=0.0, ranks=2):
    """Judge an all_gather of which each rank has the statistics in `dtype`, and rank 1 another output by `wrong`."""
    generator = np.random.default_rng(5)
    inputs = [generator.standard_normal(1001) + 1.0 for _ in range(ranks)]
    whole = np.concatenate(inputs)
    parts = []
    for rank, x in enumerate(inputs):
        side = Side()
        for quantity, values in ((COMMUNICATION_INPUT, x), (COMMUNICATION_OUTPUT, whole + wrong * (rank == 1))):
            found = reference(values)
            row = np.array([*found.values(), np.nan], dtype).astype(np.float64)
            side.take(Series("c", quantity), row, Layout((values.size,), "float32", values.size), 0)
        parts.append(seen_by(rank, "c", "all_gather", (Sums.of(side.inputs), Sums.of(side.outputs))))
    return [a.rank for a in judge(5, put_together(parts))]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sums_that_a_device_added_up_in_float32_are_compared_as_such(dtype):
    """An NPU has no float64: what differs by rounding alone is no fault, and what differs by more is."""
    assert gathered(dtype) == []
    assert gathered(dtype, wrong=1e-4) == [1]


def test_sums_in_float64_show_what_those_in_float32_cannot():
    assert gathered(np.float64, wrong=1e-8) == [1]
