"""Recorders of several hosts assemble each step once, whole and in order, even if records come late, twice or never."""

import json

import pytest
from recorder_tree import HALVES, WHOLE, Leaf, all_reduce, carry, loss, number, own, recorder, weights

from trainsentry.anomaly.anomaly import Anomaly
from trainsentry.collectors.series import Series
from trainsentry.monitor.recorder.ranks import framing
from trainsentry.monitor.recorder.ranks.collective_ledger import WAITING_STEPS


def two_hosts():
    """Rank 0, the root, and on another host ranks 1 and 2."""
    return recorder(0, None, (1,), 3), recorder(1, 0, (2,), 3), Leaf(2)


def seen_by(root):
    """The ranks whose losses the root compares, by step."""
    judged, seen = root.comparison._peers.judge, {}

    def judge(step, told, data_parallel):
        seen.setdefault(step, []).append(sorted(told))
        return judged(step, told, data_parallel)

    root.comparison._peers.judge = judge
    return seen


@pytest.mark.parametrize("first", range(1, 12))
def test_steps_that_are_complete_all_at_once_lose_nothing_wherever_they_are_cut(first):
    root, head, leaf = two_hosts()
    seen = seen_by(root)
    for step in range(6):
        own(root, step, weights(1.0 + step, HALVES[0]) + loss())
        own(head, step, weights(2.0 + step, HALVES[1]) + loss())
    for step in range(6):
        leaf.tell(head, step, loss())
    head.pump()
    carry(head, root, first)
    assert root.owner.written == [(step, 1) for step in range(5)]
    assert seen == {step: [[0, 1, 2]] for step in range(5)}
    assert (root.owner.failures, head.owner.failures) == ([], [])


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_call_over_two_hosts_names_the_rank_whose_output_is_off(rank):
    root, head, leaf = two_hosts()
    for step in range(3):
        got = [6.0 if r != rank or step != 1 else 0.0 for r in range(3)]
        leaf.tell(head, step, all_reduce(3, 3.0, got[2]))
        own(head, step, all_reduce(3, 2.0, got[1]))
        own(root, step, all_reduce(3, 1.0, got[0]))
        head.pump()
        carry(head, root)
    assert root.owner.found == [(1, rank, "conservation", False)]


def test_replicas_that_part_by_a_call_that_the_root_alone_knows_are_its_effect():
    root, head, leaf = two_hosts()
    for step in range(6):
        off = step == 4
        leaf.tell(head, step, all_reduce(3, 3.0, 0.0 if off else 6.0) + weights(step + 50.0 * off))
        own(head, step, all_reduce(3, 2.0, 6.0) + weights(float(step)))
        own(root, step, all_reduce(3, 1.0, 6.0) + weights(float(step)))
        head.pump()
        carry(head, root)
    found = [f for f in root.owner.found if f[0] == 4]
    assert (4, 2, "conservation", False) in found
    assert {f[3] for f in found if f[2] == "replicas"} == {True}


@pytest.mark.parametrize("leaf_first", [True, False])
@pytest.mark.parametrize("bad", range(6))
def test_of_replicas_on_three_hosts_of_two_ranks_the_one_that_has_parted_is_named_and_no_other(bad, leaf_first):
    """Among the two of its host nobody could tell, and the one that speaks for both may be either."""
    root = recorder(0, None, (1, 2, 4), 6)
    heads, leaves = [recorder(2, 0, (3,), 6), recorder(4, 0, (5,), 6)], [Leaf(1), Leaf(3), Leaf(5)]
    for step in range(8):
        of = [step + (50.0 + step if rank == bad and step >= 4 else 0.0) for rank in range(6)]
        leaves[0].tell(root, step, weights(of[1]))
        own(root, step, weights(of[0]))
        for head, leaf in zip(heads, leaves[1:], strict=True):
            tell = [lambda h=head: own(h, step, weights(of[h.position.rank])),
                    lambda h=head, x=leaf: x.tell(h, step, weights(of[x.rank]))]  # fmt: skip
            for one in reversed(tell) if leaf_first else tell:
                one()
                head.pump()
            carry(head, root)
    assert root.owner.found == [(4, bad, "replicas", False)]
    assert [r.owner.found for r in heads] == [[], []]
    assert [r.owner.failures for r in (root, *heads)] == [[]] * 3


@pytest.mark.parametrize("bad", [2, 3])
def test_replicas_that_only_another_host_holds_are_judged_too_and_stay_in_global(bad):
    """Stages of a pipeline over hosts, replicas within: the root has no copy of its own."""
    root, head, leaf = recorder(0, None, (2,)), recorder(2, 0, (3,)), Leaf(3)
    stages = [[(Series(name, "parameter"), *weights(1.0)[0][1:])] for name in ("first", "second")]

    def of(stage, value):
        return [(stages[stage][0][0], WHOLE, weights(value)[0][2])]

    for step in range(9):
        for rank, tell in ((2, lambda rows: own(head, step, rows)), (3, lambda rows: leaf.tell(head, step, rows))):
            tell(of(1, step + (50.0 + step if rank == bad and step >= 5 else 0.0)))
        head.pump()
        own(root, step, of(0, float(step)))
        carry(head, root)
    assert sorted(root.owner.found) == [(5, 2, "replicas", False), (5, 3, "replicas", False)]
    assert root.owner.written == [(step, 2) for step in range(8)]


@pytest.mark.parametrize("bad", [0, 2])
def test_where_only_one_rank_of_each_host_holds_a_tensor_two_hosts_are_a_tie(bad):
    root, head, leaves = recorder(0, None, (1, 2)), recorder(2, 0, (3,)), (Leaf(1), Leaf(3))
    for step in range(9):
        own(head, step, weights(step + 50.0 * (bad == 2 and step >= 5)))
        own(root, step, weights(step + 50.0 * (bad == 0 and step >= 5)))
        leaves[1].tell(head, step, loss())
        leaves[0].tell(root, step, loss())
        head.pump()
        carry(head, root)
    assert sorted(root.owner.found) == [(5, 0, "replicas", False), (5, 2, "replicas", False)]


def test_a_host_whose_ranks_are_one_against_one_is_a_tie_only_where_it_is_alone():
    head, leaf = recorder(1, 0, (2,), 3), Leaf(2)
    head.network.lost_parent = True
    for step in range(8):
        own(head, step, weights(float(step)))
        leaf.tell(head, step, weights(step + 50.0 * (step > 4)))
        head.pump()
    assert sorted(head.owner.found) == [(5, 1, "replicas", False), (5, 2, "replicas", False)]


def test_many_replicas_that_part_at_once_are_told_up_to_a_bound_and_name_no_other_rank():
    from trainsentry.monitor.recorder.ranks import replica_groups

    root, head, leaf = recorder(0, None, (1,), 3), recorder(1, 0, (2,), 3), Leaf(2)
    several = [Series(f"w{i}", "gradient") for i in range(2 * replica_groups.MAX_SENT_TENSORS)]
    for step in range(8):
        rows = [[(s, *weights(step + 50.0 * off)[0][1:]) for s in several] for off in (False, step > 4)]
        leaf.tell(head, step, rows[1])
        own(head, step, rows[0])
        own(root, step, rows[0])
        head.pump()
        carry(head, root)
    assert root.owner.found == [(5, 2, "replicas", False)] * replica_groups.MAX_SENT_TENSORS
    assert (root.owner.failures, head.owner.failures) == ([], [])


@pytest.mark.parametrize("bad", [0, 1])
def test_own_gradients_that_went_into_reductions_are_compared_over_all_hosts(bad):
    root, head, leaf = two_hosts()
    root.comparison.data_parallel = head.comparison.data_parallel = {0, 1, 2}
    for step in range(60):
        norms = [200.0 if r == bad and step >= 30 else 10.0 for r in range(3)]
        leaf.tell(head, step, all_reduce(3, 0.0, 0.0, norms[2]))
        own(head, step, all_reduce(3, 0.0, 0.0, norms[1]))
        own(root, step, all_reduce(3, 0.0, 0.0, norms[0]))
        head.pump()
        carry(head, root)
    assert [(rank, detector) for _, rank, detector, _ in root.owner.found] == [(bad, "peers")]


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_number_that_all_ranks_have_in_common_is_compared_over_two_hosts(bad):
    root, head, leaf = two_hosts()
    for step in range(40):
        rows = [number("grad_norm", 1 / (step + 3) + (rank == bad and step >= 30)) for rank in range(3)]
        leaf.tell(head, step, rows[2] + loss(3.5 + step))
        own(head, step, rows[1] + loss(2.5 + step))
        own(root, step, rows[0] + loss(1.5 + step))
        head.pump()
        carry(head, root)
    assert root.owner.found == [(30, bad, "common_numbers", False)]
    assert (root.owner.failures, head.owner.failures) == ([], [])


def test_a_host_whose_link_breaks_for_a_moment_is_compared_again():
    root, head, leaf = two_hosts()
    seen = seen_by(root)
    root.pump()
    for step in range(20):
        if step == 8:
            root.network.children = {}
            root.pump()
            root.network.children = {1: None}
        own(root, step, loss() + weights(float(step)))
        own(head, step, loss() + weights(float(step)))
        leaf.tell(head, step, loss() + weights(float(step)))
        head.pump()
        carry(head, root)
    assert [seen[step] for step in (5, 12, 17)] == [[[0, 1, 2]]] * 3
    assert all(len(times) == 1 for times in seen.values()), "each step is judged once"


def test_what_a_host_sends_from_before_a_rollback_is_nobodys_fault():
    root, head, leaf = two_hosts()

    def step_on(step, total):
        leaf.tell(head, step, all_reduce(3, total, 3 * total))
        own(head, step, all_reduce(3, total, 3 * total))
        head.pump()

    for step in range(60):
        step_on(step, 1.0)
        own(root, step, all_reduce(3, 1.0, 3.0))
    root.go_back(50)
    for step in range(50, 60):  # the data is another one
        own(root, step, all_reduce(3, 2.0, 6.0))
    carry(head, root)  # only now does the root hear what was before
    assert root.assembly.done < 50
    head.go_back(50)
    carry(head, root)
    assert root.owner.found == []


def test_a_rank_that_goes_back_before_the_root_does_meets_none_of_its_old_rows():
    root, leaf = recorder(0, None, (1,), 2), Leaf(1)
    for step in range(20):
        leaf.tell(root, step, all_reduce(2, 1.0, 2.0) + weights(float(step)))
        if step < 18:  # the root's own recorder is behind
            own(root, step, all_reduce(2, 1.0, 2.0) + weights(float(step)))
    root.pump()
    leaf.go_back(root, 17)
    for step in range(17, 22):  # the data is another one
        leaf.tell(root, step, all_reduce(2, 2.0, 4.0) + weights(100.0 + step))
    root.pump()
    for step in range(18, 20):
        own(root, step, all_reduce(2, 1.0, 2.0) + weights(float(step)))
    root.go_back(17)
    seen = seen_by(root)
    for step in range(17, 22):
        own(root, step, all_reduce(2, 2.0, 4.0) + weights(100.0 + step) + loss())
    root.pump()
    assert root.owner.found == []
    assert sorted(seen) == [17, 18, 19, 20]
    assert [step for step, _ in root.owner.written][-4:] == [17, 18, 19, 20]


@pytest.mark.parametrize("newest", [30, 12])
def test_a_rank_whose_word_of_a_rollback_is_lost_is_heard_again(newest):
    root, leaf = recorder(0, None, (1,), 2), Leaf(1)
    for step in range(30):
        own(root, step, loss() + weights(float(step)))
        if step < newest:
            leaf.tell(root, step, loss() + weights(float(step)))
    root.pump()
    root.go_back(15)
    seen = seen_by(root)
    for step in range(15, 120):
        own(root, step, loss() + weights(float(step)))
        leaf.tell(root, step, loss() + weights(float(step)))
        root.pump()
    assert [seen[step] for step in (100, 118)] == [[[0, 1]]] * 2


def test_ranks_below_a_head_that_is_cut_off_are_answered_and_their_findings_taken():
    _, head, _ = two_hosts()
    head.network.parent, head.network.lost_parent = None, True
    anomaly = Anomaly(5, 0, 2, 0, "w", "gradient", "nans", 1.0, 0.0, 1000.0, "nonfinite", "nonfinite").to_json()
    found = {"type": "found", "rank": 2, "step": 5, "anomalies": [anomaly], "activations": False, "examined": True}
    told = []
    head.network.tell_children = told.append
    for message in (found, {"type": "flush", "for": 2, "token": 7}):
        head.network.inbox.append((2, framing.JSON, json.dumps(message).encode()))
    head.pump()
    assert [a.name for a in head.owner.taken] == ["w"]
    assert [message["type"] for message in told] == ["examined", "flushed"]


def test_what_was_kept_for_a_parent_goes_before_what_is_asked_of_it_again():
    _, head, _ = two_hosts()
    parent, head.network.parent = head.network.parent, None
    head.pump()
    head.note_data_parallel({"type": "data_parallel", "rank": 1})
    head.ask_flush(7)
    head.up.message({"type": "found", "rank": 1})
    head.network.parent = parent
    head.pump()
    sent = [json.loads(data)["type"] for _, data in head.network.sent]
    assert sent[:3] == ["data_parallel", "flush", "found"]
    assert sorted(sent[3:]) == ["data_parallel", "flush"], "a successor of the parent may not know"


def test_series_that_a_successor_numbers_otherwise_keep_their_names():
    root, leaf = recorder(0, None, (1,), 2), Leaf(1)
    a, b = ([(Series(name, "gradient"), WHOLE, weights(value)[0][2])] for name, value in (("a", 1.0), ("b", 2.0)))
    for step in range(6):
        own(root, step, a + b)
        leaf.tell(root, step, a + b if step < 3 else b + a)
        if step == 2:
            leaf.begin_anew()
    root.pump()
    assert root.owner.failures == root.owner.found == []
    assert root.assembly.incomplete == 0


def test_steps_of_which_a_host_has_nothing_to_tell_end_too():
    root, head, leaf = two_hosts()
    for step in range(20):
        rows = weights(float(step)) if step < 3 else [(Series("x", "activation_output"), WHOLE, weights(1.0)[0][2])]
        own(root, step, rows)
        own(head, step, rows)
        leaf.tell(head, step, rows)
        head.pump()
        carry(head, root)
    assert root.assembly.done == 18


def test_a_rank_that_says_nothing_holds_back_a_bounded_number_of_steps():
    root, head, _ = two_hosts()
    for step in range(3 * WAITING_STEPS):
        own(head, step, all_reduce(3, 1.0, 3.0) + loss())
    assert len(head.comparison._reports) <= WAITING_STEPS
    assert len([kind for kind, _ in head.network.sent]) > WAITING_STEPS
    assert root.owner.failures == head.owner.failures == []


@pytest.mark.parametrize("step", [0, 1])
def test_a_step_in_which_nothing_was_sampled_ends_no_recorder(step):
    root, leaf = recorder(0, None, (1,), 2), Leaf(1)
    for at in range(3):
        rows = weights(float(at)) if at % 2 == step else loss()
        own(root, at, rows)
        leaf.tell(root, at, rows)
        root.pump()
    assert root.owner.failures == []


def test_a_part_that_comes_again_counts_once():
    root, head, leaf = two_hosts()
    leaf.tell(head, 0, all_reduce(4, 3.0, 10.0))  # a fourth rank says nothing
    own(head, 0, all_reduce(4, 2.0, 10.0))
    own(root, 0, all_reduce(4, 1.0, 10.0))
    for at in (1, 2):
        leaf.tell(head, at, loss())
        own(head, at, loss())
        own(root, at, loss())
    head.pump()
    again = list(head.network.sent)
    carry(head, root)
    head.network.sent = again
    carry(head, root)
    assert root.owner.found == []
