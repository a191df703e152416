"""The first suspect is what came first and is not explained by something before it."""

from dataclasses import replace

import pytest

from trainsentry.anomaly.anomaly import DRIFTS, SPIKES, Anomaly
from trainsentry.anomaly.incidents.ranking import rank
from trainsentry.anomaly.incidents.sentence import evidence, summary


def anomaly(name, quantity, step, order=0, **kwargs):
    made = Anomaly(step, 0, 0, order, name, quantity, "nans", 1.0, 0.0, 1000.0, "nonfinite", "nonfinite")
    return replace(made, **kwargs)


def order_of(anomalies, parameters=50):
    return [(r.anomaly.name, r.anomaly.quantity) for r in rank(anomalies, parameters)]


def test_steps_come_before_execution_order():
    late = anomaly("a.output.0", "activation_output", 5, order=0)
    early = anomaly("z.weight", "gradient", 4, order=99)
    assert order_of([late, early])[0] == ("z.weight", "gradient")


def test_execution_order_decides_within_a_step():
    found = [anomaly(f"m{i}.output.0", "activation_output", 3, order=10 - i) for i in range(3)]
    assert order_of(found)[0][0] == "m2.output.0"


def test_an_input_of_zeros_alone_comes_before_what_is_computed_from_it():
    """A gradient that is zero for long is told later, without a place in the execution order of its first step."""
    gone = anomaly("a.weight", "gradient", 3, order=0, kind="gradient_flow", detector="zero_gradient", score=57.0)
    blank = {"kind": "dead", "statistic": "zeros", "detector": "spike", "score": 20.0}
    assert order_of([gone, anomaly("input.0", "data", 3, order=9, value=1.0, **blank)])[0][0] == "input.0"
    assert order_of([gone, anomaly("input.0", "data", 3, order=9, value=0.7, **blank)])[0][0] == "a.weight"
    constant = {"kind": "dead", "statistic": "norm", "detector": "constant_data", "score": 70.0}
    assert order_of([gone, anomaly("input.0", "data", 3, order=9, value=0.0, **constant)])[0][0] == "input.0"
    assert order_of([gone, anomaly("input.0", "data", 3, order=9, value=1.0, **constant)])[0][0] == "a.weight"


def test_what_was_passed_on_comes_later():
    passed = anomaly("a.output.0", "activation_output", 3, order=0, passed_on=True)
    origin = anomaly("b.output.0", "activation_output", 3, order=9)
    assert order_of([passed, origin])[0][0] == "b.output.0"


def test_a_slow_change_is_dated_from_the_first_and_its_numbers_from_its_own_step():
    slow = {"kind": "drift", "detector": DRIFTS, "statistic": "max", "value": 2.0, "expected": 0.1}
    first = anomaly("a", "update", 46, order=9, last_clean=45, **slow)
    later = anomaly("b.input.0", "activation_grad_input", 49, order=1, last_clean=48, **slow)
    found = rank([first, later], 50)
    assert [(r.anomaly.name, r.onset) for r in found] == [("b.input.0", 46), ("a", 46)]
    said = summary(found)
    assert said.startswith(
        "Since step 46 on rank 0: the largest magnitude of the gradient at b.input.0 is 2 at step 49"
    )
    assert "last healthy" not in said  # it passed for healthy at step 48, when it had begun
    assert evidence(first, 46).endswith("it was last healthy at step 45")


def test_what_happens_at_one_step_is_said_to_be_at_that_step():
    spike = {"kind": "spike", "detector": SPIKES, "statistic": "norm", "value": 9.0, "expected": 0.1, "last_clean": 45}
    for kind, begins in ((spike, "At step 46 on rank 0"), ({"last_clean": 45}, "Since step 46 on rank 0")):
        assert summary(rank([anomaly("a", "gradient", 46, **kind)], 50)).startswith(begins)


def test_a_weight_last_seen_healthy_before_the_trouble_is_its_cause():
    gradients = [anomaly(f"p{i}", "gradient", 37, order=i, last_clean=36) for i in range(50)]
    weight = anomaly("p7", "parameter", 38, last_clean=30, kind="overflow", score=117.0)
    assert order_of([*gradients, weight])[0] == ("p7", "parameter")
    assert rank([*gradients, weight], 50)[0].onset == 37


def test_a_weight_seen_healthy_at_the_step_itself_is_not():
    gradients = [anomaly(f"p{i}", "gradient", 37, order=i, last_clean=36) for i in range(50)]
    weight = anomaly("p7", "parameter", 38, last_clean=37)
    assert order_of([*gradients, weight])[0] == ("p0", "gradient")


def test_weights_that_a_bad_update_ruined_everywhere_are_its_effect():
    gradients = [anomaly(f"p{i}", "gradient", 37, order=i, last_clean=36) for i in range(50)]
    weights = [anomaly(f"p{i}", "parameter", 40, order=i, last_clean=30) for i in range(50)]
    assert order_of([*gradients, *weights])[0] == ("p0", "gradient")


def test_the_strongest_of_several_weights_comes_first():
    mild = anomaly("a.weight", "parameter", 8, order=0, kind="spike", score=12.0)
    gross = anomaly("b.weight", "parameter", 8, order=1, kind="overflow", score=117.0)
    assert order_of([mild, gross])[0][0] == "b.weight"


def test_state_that_summed_up_bad_gradients_is_their_effect():
    gradient = anomaly("p", "gradient", 37, last_clean=36)
    state = anomaly("p", "exp_avg", 38, last_clean=30)
    assert order_of([gradient, state])[0] == ("p", "gradient")


def test_state_that_went_bad_alone_comes_before_what_follows():
    state = anomaly("p", "exp_avg", 40, order=5, last_clean=30)
    gradient = anomaly("p", "gradient", 41, order=0, last_clean=40)
    assert order_of([gradient, state])[0] == ("p", "exp_avg")


def test_a_weight_that_differs_between_ranks_after_its_gradient_did_is_an_effect():
    unequal = {"kind": "replica_mismatch", "statistic": "bits", "score": 100.0}
    gradient = anomaly("w", "gradient", 96, last_clean=95, **unequal)
    weight = anomaly("w", "parameter", 100, last_clean=90, **unequal)
    assert order_of([weight, gradient])[0] == ("w", "gradient")
    other = replace(weight, name="v")
    assert order_of([other, gradient])[0] == ("v", "parameter"), "its gradients were equal"


def test_a_tie_of_ranks_comes_of_the_rate_of_another_rank():
    """The ranks of a tie are told as one, which may be the rank whose rate is right."""
    option = anomaly("lr of group 0", "optimizer", 73, kind="option_change", rank=1, last_clean=72)
    tie = anomaly("tok.weight", "parameter", 80, kind="replica_mismatch", detector="replicas", last_clean=70)
    assert order_of([tie, option])[0][0] == "lr of group 0"
    assert order_of([tie, replace(option, step=81)])[0][0] == "tok.weight"


def test_a_weight_that_is_abnormal_after_an_option_changed_is_an_effect():
    rate = anomaly("lr of group 0", "optimizer", 93, order=90, kind="option_change", last_clean=92)
    weight = anomaly("w", "parameter", 100, kind="shift", last_clean=90)
    assert order_of([rate, weight])[0] == ("lr of group 0", "optimizer")
    assert order_of([rate, replace(weight, step=93)])[0] == ("w", "parameter"), "it was so before the update"


def test_a_buffer_that_never_changed_before_is_no_effect():
    gradients = [anomaly(f"p{i}", "gradient", 94, order=i, last_clean=93) for i in range(50)]
    weights = [anomaly(f"p{i}", "parameter", 95, order=i, last_clean=90) for i in range(50)]
    mask = anomaly("mask", "buffer", 95, last_clean=90, detector="constant_buffer")
    assert order_of([*gradients, *weights, mask])[0] == ("mask", "buffer")
    running = replace(mask, name="norm.running_var", detector="nonfinite")
    assert order_of([*gradients, *weights, running])[0] == ("p0", "gradient"), "a pass writes to it"


def test_a_switch_that_somebody_set_comes_before_what_the_step_computed():
    loss = anomaly("loss", "loss", 96, order=1, kind="spike", last_clean=95)
    for kind in ("mode_change", "option_change"):
        switch = anomaly("drop", "training", 96, order=90, kind=kind, alarm=False, last_clean=95)
        assert order_of([loss, switch])[0] == ("drop", "training")
    rate = anomaly("group 0", "optimizer", 96, order=90, kind="option_change", last_clean=95)
    assert order_of([loss, rate])[0] == ("loss", "loss"), "a rate acts at the end of its step"


@pytest.mark.parametrize(
    ("kind", "detector", "first"),
    [("dtype_change", "dtype_change", "fc"), ("shift", "zero_pattern", "fc"), ("shift", "levels", "loss")],
)
def test_what_only_code_changes_may_be_the_cause_where_it_is_read_later(kind, detector, first):
    loss = anomaly("loss", "loss", 145, last_clean=144)
    later = anomaly("fc", "activation_output", 150, kind=kind, detector=detector, value=0.0, last_clean=140)
    assert order_of([loss, later])[0][0] == first
    assert order_of([loss, replace(later, last_clean=146)])[0][0] == "loss"  # it began after the loss


def test_an_activation_next_read_after_its_gradient_vanished_may_be_the_cause():
    gradient = anomaly("a.weight", "gradient", 96, order=50, kind="dead", last_clean=95)
    dead = anomaly("a.output.0", "activation_output", 97, order=3, kind="dead", last_clean=90)
    assert order_of([gradient, dead])[0] == ("a.output.0", "activation_output")
    assert rank([gradient, dead], 50)[0].onset == 96
    healthy_between = replace(dead, last_clean=96)
    assert order_of([gradient, healthy_between])[0] == ("a.weight", "gradient")
    large = replace(gradient, kind="spike")
    assert order_of([large, dead])[0] == ("a.weight", "gradient"), "its update may have made the activation abnormal"


def test_a_dead_output_next_read_after_gradients_inside_its_module_vanished_may_be_the_cause():
    inside = anomaly("a.fc.weight", "gradient", 96, order=50, kind="dead", last_clean=95)
    beside = anomaly("b.weight", "gradient", 96, order=40, kind="shift", last_clean=95)
    dead = anomaly("a.output.0", "activation_output", 97, order=3, kind="dead", last_clean=90, module="a")
    assert order_of([beside, inside, dead])[0] == ("a.output.0", "activation_output")
    for other in (replace(inside, name="ab.weight"), replace(inside, kind="spike"), replace(inside, step=97)):
        assert order_of([beside, other, dead])[0] == ("b.weight", "gradient")
    assert order_of([beside, inside, replace(dead, kind="shift")])[0] == ("b.weight", "gradient")
    assert order_of([beside, inside, replace(dead, rank=1)])[0] == ("b.weight", "gradient")


def test_a_tie_of_replicas_is_settled_by_the_rank_whose_weight_was_modified():
    tie = [anomaly("w", "parameter", 7, rank=r, value=1.0, expected=1.0, detector="replicas", kind="replica_mismatch",
                   statistic="bits", last_clean=6, score=100.0) for r in (0, 1)]  # fmt: skip
    own = anomaly("w", "parameter", 7, rank=1, detector="continuity", kind="shift", statistic="mean", score=80.0)
    assert [r.anomaly.rank for r in rank(tie, 50)] == [0, 1]
    assert summary(rank(tie, 50)).startswith("Since step 7: parameter w differs bitwise between ranks")
    found = rank([*tie, own], 50)
    assert [(r.anomaly.rank, r.anomaly.kind) for r in found] == [(1, "replica_mismatch"), (0, "replica_mismatch")]
    assert "was modified outside the optimizer update on rank 1" in evidence(found[0].anomaly)
    assert summary(found).startswith("Since step 7 on rank 1: ")
    other = replace(own, name="v")
    assert [r.anomaly.rank for r in rank([*tie, other], 50) if r.anomaly.name == "w"] == [0, 1]


def test_of_several_anomalies_of_a_series_at_a_step_the_strongest_stands():
    weak = anomaly("w", "parameter", 7, kind="spike", score=300.0)
    hard = anomaly("w", "parameter", 7, kind="replica_mismatch", score=100.0)
    for order in ([weak, hard], [hard, weak]):
        assert [r.anomaly.kind for r in rank(order, 50)] == ["replica_mismatch"]
    assert rank([hard, anomaly("w", "parameter", 6, kind="spike")], 50)[0].anomaly.step == 6


@pytest.mark.parametrize(("value", "first"), [(1.0, "up"), (0.003, "all")])
def test_one_gradient_that_outgrew_the_others_comes_before_their_fall_by_clipping(value, first):
    fall = anomaly("all", "gradient", step=7, order=1)
    fall = replace(fall, value=0.03, expected=1.0, kind="shift")
    spike = replace(anomaly("up", "gradient", step=7, order=9), value=value, expected=0.0016, kind="spike")
    assert rank([fall, spike], 50)[0].anomaly.name == first


def test_nothing_gives_nothing():
    assert rank([], 10) == []


@pytest.mark.parametrize(("expected", "said"), [(7.27e-9, "usually 0;"), (0.3, "usually 0.3;")])
def test_a_share_that_an_average_has_left_of_one_element_is_none(expected, said):
    zeros = anomaly("fc", "momentum_buffer", 9, kind="shift", detector="levels", statistic="zeros", expected=expected)
    assert said in evidence(replace(zeros, last_clean=8))


@pytest.mark.parametrize(("at_output", "in_block", "first"), [
    (4.0, 3.7, ("all", "gradient")),
    (1.0, 3.7, ("head.output.0", "activation_grad_output")),
    (4.0, 40.0, ("head.output.0", "activation_grad_output")),
])  # fmt: skip
def test_gradients_off_by_one_factor_from_the_models_output_on_are_all_gradients(at_output, in_block, first):
    """A loss that is not divided scales them all; what a block does alone, or does more of, is its own."""
    scaled = {"kind": "shift", "detector": SPIKES, "statistic": "norm", "expected": 1.0}
    everything = anomaly("all", "gradient", 91, order=80, value=3.9, **scaled)
    block = anomaly("head.output.0", "activation_grad_output", 91, order=5, value=in_block, module="head", **scaled)
    output = anomaly("output.0", "activation_grad_output", 91, order=6, value=at_output, module="", **scaled)
    assert order_of([block, output, everything])[0] == first


@pytest.mark.parametrize(("rank", "times", "first"), [
    (0, 3.7, ("all", "gradient")),
    (1, 3.7, ("all", "gradient")),
    (0, 40.0, ("fc.0.weight", "gradient")),
    (1, 40.0, ("fc.0.weight", "gradient")),
])  # fmt: skip
def test_gradients_off_by_the_factor_of_all_follow_beside_their_logged_norm_and_on_another_stage(rank, times, first):
    scaled = {"kind": "shift", "detector": SPIKES, "statistic": "norm", "expected": 1.0}
    everything = anomaly("all", "gradient", 91, rank=0, order=80, value=3.9, **scaled)
    logged = anomaly("grad_norm", "grad_norm", 91, rank=0, order=90, value=3.8, **scaled)
    single = [anomaly(f"fc.{i}.weight", "gradient", 91, rank=rank, order=i, value=times, **scaled) for i in range(3)]
    assert order_of([*single[: 3 - 2 * rank], logged, everything])[0] == first


@pytest.mark.parametrize("step", [96, 100])
@pytest.mark.parametrize(("last_clean", "is_cause"), [(90, True), (97, False)])
def test_a_module_whose_output_is_another_since_its_updates_are_missing_was_left_out(step, last_clean, is_cause):
    missing = anomaly("ln.weight", "update", 96, order=0, kind="frozen", score=60.0, last_clean=95)
    output = anomaly(
        "ln.output.0", "activation_output", step, order=7, kind="shift", module="ln", last_clean=last_clean
    )
    found = rank([missing, output], 50)
    assert [r.anomaly.name for r in found] == (
        ["ln.output.0", "ln.weight"] if is_cause else ["ln.weight", "ln.output.0"]
    )
    assert found[0].onset == 96
    other = replace(output, name="other.output.0", module="other")
    assert order_of([missing, other])[0] == ("ln.weight", "update")


def test_an_alarm_of_an_output_counts_more_than_the_suspicion_that_its_gradients_raise():
    sums = {"kind": "gradient_flow", "detector": "gradient_sums", "score": 80.0, "last_clean": 99}
    bias = anomaly("ln.bias", "gradient", 100, order=30, **sums)
    suspicion = anomaly("ln.output.0", "activation_output", 100, order=30, passed_on=True, alarm=False, **sums)
    level = anomaly("ln.output.0", "activation_output", 100, order=4, kind="shift", score=60.0, last_clean=90)
    assert order_of([bias, suspicion])[0] == ("ln.bias", "gradient")
    assert order_of([bias, suspicion, level])[0] == ("ln.output.0", "activation_output")


@pytest.mark.parametrize(("last_clean", "is_cause"), [(90, True), (95, False)])
@pytest.mark.parametrize("cause", [
    ("input.0", "data", {"kind": "duplicate_data", "detector": "repeated_samples"}),
    ("logits.output.0", "activation_output", {"kind": "precision", "detector": "precision"}),
])  # fmt: skip
def test_copies_in_a_batch_and_rounded_outputs_are_there_before_they_are_read(cause, last_clean, is_cause):
    name, quantity, found = cause
    gradient = anomaly("head.weight", "gradient", 93, order=9, kind="shift", last_clean=92)
    seen = anomaly(name, quantity, 100, order=1, last_clean=last_clean, **found)
    assert order_of([gradient, seen])[0][0] == (name if is_cause else "head.weight")


@pytest.mark.parametrize(("other", "first"), [(1e-5, "all"), (1e-2, "layers.0.weight")])
def test_where_all_gradients_are_off_by_one_factor_none_of_them_is_to_blame(other, first):
    """They are clipped while they are scaled still."""
    off = {"kind": "dead", "detector": SPIKES, "statistic": "max", "expected": 1.0, "value": 1e-5}
    gradients = [anomaly(f"layers.{i}.weight", "gradient", 91, order=i, **off) for i in range(5)]
    gradients[3] = replace(gradients[3], value=other)
    assert order_of([*gradients, anomaly("all", "gradient", 91, order=80, **off)])[0][0] == first
