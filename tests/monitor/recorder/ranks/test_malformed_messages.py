"""When the recorder of a rank of the run sends nonsense, only that rank's records are lost."""

import json
import struct
import time

import numpy as np
import pytest
from recorder_tree import ALONE, HALVES, WHOLE, Leaf, all_reduce, carry, loss, own, record, recorder, row, weights
from recording_process import Recording

from trainsentry.anomaly.across_ranks.peers import PeerRule, RankReport
from trainsentry.anomaly.anomaly import STRAGGLER, Anomaly
from trainsentry.collectors.series import Series, SeriesTable
from trainsentry.monitor.recorder import messages
from trainsentry.monitor.recorder.ranks import framing, shard_assembly
from trainsentry.monitor.recorder.ranks.peer_messages import ALL, MAX_INVALID, InvalidMessage, PeerMessages

BAD = 1
"""The rank that sends nonsense to the root; ranks 0 and 2 train on."""

ANOMALY = Anomaly(3, 0, 1, 0, "w", "gradient", "norm", 1.0, 0.5, 9.0, "test", "spike").to_json()
FOUND = {"type": "found", "rank": 1, "step": 3, "anomalies": [], "activations": False, "examined": False}
PARTS = {"type": "parts", "step": 3, "told": [], "calls": [], "copies": [], "reductions": None, "numbers": {},
         "found": []}  # fmt: skip
SERIES = {"name": "w", "quantity": "gradient"}
SUMS = {"total": 1.0, "norm": 1.0, "numel": 4, "finite": True, "dtype": "float32"}
CALL = {"name": "c", "op": "all_reduce", "ranks": 1, "first": 1, "put_in": SUMS, "norms": 1.0, "longest": 4,
        "sizes": [[4, "float32"]], "sources": [], "got": SUMS,
        "outputs": [{"total": 1.0, "finite": True, "places": [[1, 0]]}],
        "asked": [{"reduction": 1, "count": 1, "ranks": [1]}]}  # fmt: skip
PART = {"key": ["all_reduce", "world", 0, 0], "size": 3, "call": CALL}
REDUCTIONS = {"ranks": 1, "first": 1, "sums": {"w": [1.0, 1.0]}, "alike": True}


def definitions(series=(), layouts=(), series_from=0, layouts_from=0):
    return {"type": "define", "series_from": series_from, "series": list(series), "layouts_from": layouts_from,
            "layouts": list(layouts)}  # fmt: skip


def told(**values):
    """A told rank: its loss, gradient, seconds, wait, data, order, and seconds outside of the model."""
    names = ("rank", "loss", "gradient", "seconds", "waited", "data", "order", "outside")
    return [{"rank": 1, **values}.get(name) for name in names]


MESSAGES = {
    "nested": b"[" * 100_000,
    "nested deeper": b'{"type": ' * 50_000,
    "no text": b"\xff\xfe",
    "a long number": b'{"type": "back", "step": ' + b"9" * 10_000 + b"}",
    "list": [],
    "number": 7,
    "no type": {"step": 3},
    "type": {"type": ["back"], "step": 3},
    "closed": {"type": "closed"},
    "failure": {"type": "failure", "part": "x", "message": "y", "step": 0},
    "from the root": {"type": "incident", "incident": {}, "settled": 1},
    "end": {"type": "end"},
    "back": {"type": "back", "step": "3"},
    "back to nothing": {"type": "back", "step": -5},
    "back to a part": {"type": "back", "step": 1.5},
    "done": {"type": "done", "rank": 1, "step": None},
    "done far": {"type": "done", "rank": 1, "step": ALL + 1},
    "data parallel": {"type": "data_parallel", "rank": 77},
    "action": {"type": "action", "incident": {}, "action": "x"},
    "flush": {"type": "flush", "for": [], "token": 1},
    "found": FOUND | {"step": "x"},
    "found of nobody": FOUND | {"rank": 5},
    "found truth": FOUND | {"examined": "yes"},
    "found nothing": FOUND | {"anomalies": None},
    "found name": FOUND | {"anomalies": [ANOMALY | {"name": ["w"]}]},
    "found step": FOUND | {"anomalies": [ANOMALY | {"step": True}]},
    "found value": FOUND | {"anomalies": [ANOMALY | {"value": 10**400}]},
    "found more": FOUND | {"anomalies": [ANOMALY | {"more": 1}]},
    "found long": FOUND | {"anomalies": [ANOMALY | {"name": "x" * 100_000}]},
    "parts": PARTS | {"step": "x"},
    "parts lack": {"type": "parts", "step": 3},
    "told": PARTS | {"told": [[1, 2]]},
    "told twice": PARTS | {"told": {"1": 2}},
    "told squares": PARTS | {"told": [told(gradient=-1.0)]},
    "told text": PARTS | {"told": [told(loss="nan")]},
    "copies": PARTS | {"copies": [[2**80, 1, 5, 0]]},
    "copies unknown": PARTS | {"copies": [[5 << 32, 1, 5, 0]]},
    "copies negative": PARTS | {"copies": [[-1, 1, 5, 0]]},
    "calls": PARTS | {"calls": [PART | {"key": [1]}]},
    "calls size": PARTS | {"calls": [PART | {"size": "3"}]},
    "calls asked": PARTS | {"calls": [PART | {"call": CALL | {"asked": []}}]},
    "calls sums": PARTS | {"calls": [PART | {"call": CALL | {"got": {}}}]},
    "reductions": PARTS | {"reductions": {"ranks": 0}},
    "reduction sums": PARTS | {"reductions": REDUCTIONS | {"sums": {"w": [1.0]}}},
    "numbers": PARTS | {"numbers": [["lr", 0.5]]},
    "numbers of nobody": PARTS | {"numbers": {"lr": [[0.5, [77]]]}},
    "numbers as text": PARTS | {"numbers": {"lr": [["0.5", [1]]]}},
    "define": definitions() | {"series": 7},
    "define names": definitions([{"name": [], "quantity": "gradient"}]),
    "define more": definitions([SERIES | {"color": "red"}]),
    "define from behind": definitions([SERIES], series_from=-1),
    "define from beyond": definitions([SERIES], series_from=100),
    "define layouts": definitions(layouts=[[[4], "float32", 10**30, None, ""]]),
    "define shapes": definitions(layouts=[[["4"], "float32", 4, None, ""]]),
    "define negative": definitions(layouts=[[[-4], "float32", -4, None, ""]]),
    "define quantities": definitions([{"name": "w", "quantity": f"q{i}"} for i in range(100)]),
}

HEAD = struct.Struct("=qqiiiid")
RECORDS = {
    "empty": b"",
    "short": b"x" * 7,
    "rows missing": HEAD.pack(3, 0, 1, 1000, 0, 0, 0.0),
    "rows negative": HEAD.pack(3, 0, 1, -1, 0, 0, 0.0) + bytes(72),
    "unknown series": HEAD.pack(3, 0, 1, 1, 0, 0, 0.0) + struct.pack("=ii", 999, 0) + bytes(64),
    "negative series": HEAD.pack(3, 0, 1, 1, 0, 0, 0.0) + struct.pack("=ii", -1, 0) + bytes(64),
    "unknown layout": HEAD.pack(3, 0, 1, 1, 0, 0, 0.0) + struct.pack("=ii", 0, -7) + bytes(64),
    "negative step": HEAD.pack(-3, 0, 1, 0, 0, 0, 0.0),
    "absurd step": HEAD.pack(2**62, 0, 1, 0, 0, 0, 0.0),
}


def say(root, data, kind=framing.JSON, times=1):
    data = data if isinstance(data, bytes) else json.dumps(data).encode()
    root.network.inbox += [(BAD, kind, data)] * times
    root.pump()


def train(root, leaf, steps):
    """Ranks 0 and 2 hold a half of a gradient each, and one sum over both."""
    for step in steps:
        own(root, step, weights(1.0 + step, HALVES[0]) + loss() + all_reduce(2, 1.0, 3.0))
        leaf.tell(root, step, weights(2.0 + step, HALVES[1]) + loss() + all_reduce(2, 2.0, 3.0))
        root.pump()


def check_others(root, leaf):
    """Ranks 0 and 2 go on, whatever rank 1 is."""
    train(root, leaf, range(4, 10))
    root.assembly.finish(BAD, ALL)  # as when it is gone
    own(root, 10, loss())
    leaf.tell(root, 10, loss())
    root.pump()
    assert root.owner.written == [(step, 1) for step in range(10)]
    assert [f for f in root.owner.found if f[1] != BAD] == []
    assert all(part != "comparison of ranks" for part, *_ in root.owner.failures)


def tree():
    root, leaf = recorder(0, None, (1, 2), 3), Leaf(2)
    train(root, leaf, range(4))
    return root, leaf


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_that_cannot_be_is_left_out_and_the_others_go_on(name):
    root, leaf = tree()
    say(root, MESSAGES[name])
    assert [part for part, *_ in root.owner.failures] == ["messages of other ranks"]
    assert root.owner.taken == []
    assert root.network.banned == set()
    check_others(root, leaf)


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_that_cannot_be_is_left_out_and_the_others_go_on(name):
    root, leaf = tree()
    say(root, RECORDS[name], framing.RECORD)
    assert [part for part, *_ in root.owner.failures] == ["messages of other ranks"]
    check_others(root, leaf)


def test_who_sends_nonsense_again_and_again_is_heard_no_more_and_that_is_said_once():
    root, leaf = tree()
    say(root, MESSAGES["nested"], times=100)
    say(root, FOUND | {"anomalies": [ANOMALY]})
    assert root.network.banned == {BAD}
    assert len(root.owner.failures) == MAX_INVALID + 1
    assert "rank 1" in root.owner.failures[-1][1]
    assert root.owner.taken == []
    assert root.assembly.done < ALL  # it is waited for the others still
    check_others(root, leaf)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e308, -1e308, 0.0])
def test_numbers_that_cannot_be_in_the_record_of_one_rank_harm_no_comparison_of_the_others(value):
    root, leaf = tree()
    names = ("loss", "step_seconds", "communication_seconds", "communication_order")
    bad = Leaf(BAD)
    for step in range(4, 8):
        rows = [(Series(name, name, scalar=True), ALONE, row(value=value)) for name in names]
        rows += [(series, layout, np.full_like(values, value)) for series, layout, values in all_reduce(3, 0.0, 0.0)]
        bad.tell(root, step, rows)
        root.pump()
    check_others(root, leaf)


@pytest.mark.parametrize("spoilt", [{"seconds": np.nan}, {"waited": np.nan}, {"seconds": np.inf}])
def test_a_rank_whose_times_are_no_numbers_hides_no_straggler_among_the_others(spoilt):
    rule, found = PeerRule(), []
    for step in range(60):
        times = {rank: RankReport(seconds=1.0, waited=0.9 if rank != 4 else 0.0, order=7.0) for rank in range(5)}
        times[BAD] = RankReport(**{"seconds": 1.0, "waited": 0.9, **spoilt}, order=np.nan)
        found += rule.judge(step, times, frozenset())
    assert [(a.rank, a.kind) for a in found] == [(4, STRAGGLER)]


@pytest.mark.parametrize("step", [10**7, 2**50])
def test_a_rank_that_is_far_ahead_of_all_others_does_not_have_their_steps_given_up(step):
    root, leaf = tree()
    bad = Leaf(BAD)
    for i in range(2 * shard_assembly.PENDING_STEPS):
        bad.tell(root, step + i, weights(1.0) + loss())
        say(root, PARTS | {"step": step + i, "told": [told(loss=1.0)]})
    assert len(root.owner.failures) == 1
    check_others(root, leaf)


def test_a_rank_that_goes_back_again_and_again_does_not_have_the_others_left_out():
    root, leaf = tree()
    say(root, {"type": "back", "step": 2}, times=100)
    assert root.network.banned == {BAD}
    train(root, leaf, range(4, 10))
    own(root, 10, loss())
    leaf.tell(root, 10, loss())
    root.pump()
    assert [step for step, _ in root.owner.written][-6:] == list(range(4, 10))


def test_a_rank_defines_no_more_than_memory_is_there_for(monkeypatch):
    monkeypatch.setattr(shard_assembly, "MAX_DEFINED", 100)
    root, leaf = tree()
    for turn in range(20):
        say(root, definitions([{"name": f"w{turn}.{i}", "quantity": "gradient"} for i in range(30)]))
        table = SeriesTable()
        table.define(definitions([{"name": f"w{turn}.{i}", "quantity": "gradient"} for i in range(30)]))
        made = record(table, 3, BAD, [(table.series[0], WHOLE, row(value=1.0))])
        say(root, definitions(layouts=[[[4], "float32", 4, None, f"{turn}:{turn}"]], series_from=30))
        say(root, b"".join(made.encode()), framing.RECORD)
    assert len(root.assembly.table.series) < 200
    check_others(root, leaf)


@pytest.mark.parametrize("name", sorted(set(MESSAGES) - {"end"}))
def test_of_a_parent_nothing_reaches_the_trainer_that_the_root_does_not_say(name):
    head = recorder(1, 0, (2,), 3)
    head.owner.take_from_root = lambda message: pytest.fail(f"the trainer hears {message}")
    head.network.inbox.append((0, framing.JSON, json.dumps(MESSAGES[name]).encode()
                               if not isinstance(MESSAGES[name], bytes) else MESSAGES[name]))  # fmt: skip
    head.pump()
    assert len(head.owner.failures) == 1
    assert not head.network.lost_parent


def test_what_recorders_do_say_to_each_other_is_taken():
    """Both directions, of a tree with everything in it: calls, copies that differ, anomalies, reductions."""
    root, head, leaf = recorder(0, None, (1,), 3), recorder(1, 0, (2,), 3), Leaf(2)
    for rank in range(3):
        head.note_data_parallel({"type": "data_parallel", "rank": rank})
    own_gradient = Series("w", "gradient_unreduced")
    for step in range(8):
        rows = [(own_gradient, WHOLE, row(mean=1.0, norm=2.0)), *weights(1.0 + step), *loss(), *all_reduce(3, 2.0, 6.0)]
        off = [(own_gradient, WHOLE, row(mean=np.nan, norm=np.inf)), *weights(99.0 + step), *loss(np.nan),
               *all_reduce(3, 3.0, 0.0)]  # fmt: skip
        leaf.tell(head, step, off if step > 4 else rows)
        own(head, step, rows)
        own(root, step, rows)
        head.pump()
        carry(head, root)
    assert (root.owner.failures, head.owner.failures) == ([], [])
    assert root.owner.found


def test_the_sentences_of_an_incident_are_taken_from_the_root():
    from trainsentry.anomaly.incidents.incident_log import IncidentLog

    table = SeriesTable()
    log = IncidentLog(table)
    made = log.observe(3, [Anomaly.from_json(ANOMALY | {"kind": "nonfinite", "value": None})])
    said = json.dumps({"type": "incident", "incident": made.to_json(), "settled": 1}).encode()
    assert PeerMessages((0, 1, 2)).of_root(said)["incident"]["id"] == made.id
    for wrong in ({"suspects": [{}]}, {"id": "1"}, {"rank": 9}, {"actions": [1]}):
        spoilt = json.dumps({"type": "incident", "incident": made.to_json() | wrong, "settled": 1}).encode()
        with pytest.raises(InvalidMessage):
            PeerMessages((0, 1, 2)).of_root(spoilt)


def test_a_fault_of_ours_in_the_connections_ends_them_and_not_the_recording():
    root, _ = tree()
    whole = root.network.pump
    root.network.pump = lambda: 1 / 0
    root.pump()
    root.network.pump = whole
    root.pump()
    assert [part for part, *_ in root.owner.failures] == ["connections between recorders"]
    assert root.network.children == {}
    for step in range(4, 8):  # the last is not over yet
        own(root, step, weights(1.0 + step))
        root.pump()
    assert [step for step, _ in root.owner.written][-3:] == [4, 5, 6]


@pytest.mark.parametrize("said", [b"[" * 100_000, b"[]", b'{"type": "found", "rank": 1, "step": NaN}', b"\xff"])
def test_a_rank_that_knows_the_secret_and_sends_nonsense_costs_nobody_else_anything(tmp_path, said):
    """Messages from rank 2, another recorder of the run, still arrive after rank 1's nonsense."""
    recording = Recording(tmp_path)
    recording.record()
    bad, good = recording.others()
    lost, end = bad.parent, time.monotonic() + 60
    while not lost.closed:
        assert not list(bad.pump())
        bad.send_up(framing.JSON, said)
        assert time.monotonic() < end
    anomaly = Anomaly(0, 0, 2, 0, "w", "gradient", "nans", 1.0, 0.0, 9.0, "nonfinite", "nonfinite").to_json()
    good.tell_parent(
        {"type": "found", "rank": 2, "step": 0, "anomalies": [anomaly], "activations": False, "examined": False}
    )
    while not any(message["type"] == messages.INCIDENT for message in recording.heard):
        recording.record()
        assert time.monotonic() < end
    failures = [message["message"] for message in recording.heard if message["type"] == messages.FAILURE]
    assert len(failures) <= MAX_INVALID + 1, failures[-1]
    good.close()
    recording.check(others=False)
