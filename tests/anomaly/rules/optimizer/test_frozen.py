"""A parameter with a gradient is updated, and one that was updated so far still is."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from step_records import Records
from torch import nn
from torch.nn.functional import linear

import trainsentry
from trainsentry.anomaly.anomaly import Anomaly
from trainsentry.anomaly.detection import Detection
from trainsentry.anomaly.rules.optimizer.frozen import FrozenRule
from trainsentry.collectors.series import Layout

U, G = ("fc.weight", "update"), ("fc.weight", "gradient")
OTHER = ("head.weight", "update")
RATE = ("learning_rate", "learning_rate")
COUNT = ("updated_parameters", "updated_parameters")


@pytest.fixture
def records():
    return Records()


@pytest.fixture
def rule(records, alone):
    return alone(FrozenRule, records.table)


class Pooler(nn.Linear):
    """A layer whose weight gets no gradient."""

    def forward(self, x):
        return linear(x, self.weight.detach(), self.bias)


class Detached(nn.Module):
    """A net that cuts off what its first layer gives, by mistake."""

    def __init__(self):
        super().__init__()
        self.pooler = nn.Linear(8, 8)
        self.body = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)))

    def forward(self, x):
        return self.body(self.pooler(x).detach()), 0.0


class Encoder(nn.Module):
    """Gives the mean of its tokens and a pooled one, which some trainings do not use."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)))
        self.pooler = Pooler(8, 8)

    def forward(self, x):
        tokens = self.body(x)
        return tokens.mean(dim=1), self.pooler(tokens[:, 0])


@pytest.mark.parametrize(
    ("net", "is_used", "told"),
    [
        (Encoder, True, {("pooler.weight", "warning", "no gradient comes to it")}),
        (Encoder, False, {("pooler.weight", "note", "which is not used, or detached")}),
        (Detached, False, {("pooler.weight", "warning", "no gradient comes to it")}),
    ],
)
def test_a_part_that_a_training_does_not_use_is_a_note_and_a_weight_that_it_leaves_out_none(
    tmp_path, net, is_used, told
):
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {"output_dir": str(tmp_path), "on_incident": False}
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        for _ in range(40):
            optimizer.zero_grad()
            mean, pooled = model(torch.randn(4, 3, 8))
            (mean + pooled if is_used else mean).square().mean().backward()
            optimizer.step()
    assert {
        (i.name, i.severity, words) for i in monitor.incidents for _, _, words in told if words in i.summary
    } == told
    assert len(monitor.incidents) == 1


@pytest.mark.parametrize(("numel", "found_after"), [(16, 1), (2, 3)])
def test_a_tensor_of_a_few_numbers_may_stand_still_for_a_moment(numel, found_after, records, rule):
    """As the sign of its average turns, the update of a number passes zero, and may be rounded away."""
    layout = records.table.layout_id(Layout((numel,), "float32", numel))

    def found_in(steps, size):
        parts = [replace(records.step(step, {G: 1.0, U: size}), layouts=np.full(2, layout)) for step in steps]
        return [len(rule(part)) for part in parts]

    assert not any(found_in(range(12), 1.0))
    if found_after > 1:
        assert not any(found_in(range(12, 12 + found_after - 1), 0.0))
        assert not any(found_in(range(14, 26), 1.0))
    found = found_in(range(26, 30), 0.0)
    assert found == [int(n == found_after) for n in range(1, 5)]


def test_an_update_of_zero_is_frozen_once_and_not_where_the_gradient_is_zero_or_the_step_was_skipped(
    records, rule, judged
):
    assert judged(rule, records, range(12), {G: 1.0, U: 1.0}) == []
    assert judged(rule, records, [12], {G: 0.0, U: 0.0}) == []
    assert judged(rule, records, range(13, 25), {G: 1.0, U: 1.0}) == []
    assert judged(rule, records, [25], {G: 1.0, U: 0.0}, skipped=True) == []
    assert judged(rule, records, range(26, 38), {G: 1.0, U: 1.0, RATE: 1.0}) == []
    assert judged(rule, records, [38], {G: 1.0, U: 0.0, RATE: 0.0}) == []
    assert judged(rule, records, range(39, 51), {G: 1.0, U: 1.0, RATE: 1.0}) == []
    assert [f.kind for f in judged(rule, records, [51, 52, 53], {G: 1.0, U: 0.0, RATE: 1.0})] == ["frozen"]


@pytest.mark.parametrize(("is_swapped", "kinds"), [(True, []), (False, ["frozen"])])
def test_averages_that_are_swapped_in_for_a_last_pass_learn_nothing(is_swapped, kinds, records, rule, judged):
    """As at the end of stochastic weight averaging, when the statistics of batch norms are taken anew."""
    assert judged(rule, records, range(12), {G: 1.0, U: 1.0}) == []
    swapped = {("outside_writes", "outside_writes"): 2.0} if is_swapped else {}
    assert [f.kind for f in judged(rule, records, [12], {G: 1.0, U: 0.0, **swapped})] == kinds


def test_an_update_that_is_missing_is_frozen_and_so_is_a_step_without_any(records, rule, judged):
    assert judged(rule, records, range(12), {U: 1.0, OTHER: 1.0, COUNT: 2.0}) == []
    [found] = judged(rule, records, range(12, 15), {OTHER: 1.0, COUNT: 1.0})
    assert (records.table.series[found.series_id].name, found.step) == ("fc.weight", 12)
    [found] = judged(rule, records, [15], {COUNT: 0.0})
    assert records.table.series[found.series_id].name == "updated_parameters"


@pytest.mark.parametrize("gradients", [True, False])
def test_an_update_is_missing_since_its_gradient_is_where_gradients_are_sampled_more_often(
    gradients, records, rule, judged
):
    def sizes(step):
        updates = {U: 1.0, OTHER: 1.0} if step <= 66 else {OTHER: 1.0}
        of_gradients = {G: 1.0, ("head.weight", "gradient"): 1.0} if step <= 66 else {("head.weight", "gradient"): 1.0}
        return {**(updates if step % 10 == 0 else {}), **(of_gradients if gradients else {}), RATE: 1.0}

    [found] = judged(rule, records, range(120), sizes)
    assert records.table.series[found.series_id].name == "fc.weight"
    assert (found.step, found.last_clean) == ((67, 66) if gradients else (70, 60))


def test_a_run_that_goes_back_was_healthy_before_its_update_is_missing(records, rule, judged):
    assert judged(rule, records, range(200), {G: 1.0, U: 1.0, OTHER: 1.0, RATE: 1.0}) == []
    [found] = judged(rule, records, range(100, 104), {OTHER: 1.0, RATE: 1.0})
    assert found.last_clean < found.step == 100


def test_of_updates_that_go_missing_at_once_the_module_nearest_to_the_cut_comes_first(records, rule, judged):
    cut = [(name, "update") for name in ("a.weight", "a.bias", "b.weight", "b.bias")]
    assert judged(rule, records, range(6), dict.fromkeys([*cut, OTHER], 1.0)) == []
    found = judged(rule, records, range(6, 9), {OTHER: 1.0})
    assert [records.table.series[f.series_id].name for f in found] == ["b.weight", "b.bias", "a.weight", "a.bias"]
    assert all(np.isnan(f.value) for f in found)


def test_updates_that_are_sampled_seldom_are_not_missing_in_between(records, rule, judged):
    sizes = lambda step: {U: 1.0, COUNT: 1.0} if step % 10 == 0 else {G: 1.0}  # noqa: E731
    assert judged(rule, records, range(300), sizes) == []


@pytest.mark.parametrize(("frozen", "expected"), [(1, 1), (8, 0)], ids=["one of ten", "a frozen backbone"])
def test_one_parameter_of_many_that_never_moves_is_named(frozen, expected, records, rule, judged):
    weights = {(f"p{i}", "parameter"): 1.0 for i in range(10)}
    moving = {(f"p{i}", "update"): 1.0 for i in range(frozen, 10)}
    assert len(judged(rule, records, range(20), {**weights, **moving})) == expected


@pytest.mark.parametrize(
    ("has_gradient", "ending"),
    [(False, "most others move: no gradient comes to it, or no optimizer holds it"), (True, "move")],
)
def test_a_parameter_that_never_moves_has_no_gradient_or_one(has_gradient, ending, records, rule, judged):
    graded = {(f"fc.p{i}", "gradient"): 1.0 for i in range(0 if has_gradient else 1, 10)}
    called = {("fc.output.0", "activation_output"): 1.0, **{(f"fc.p{i}", "parameter"): 1.0 for i in range(10)}}
    sampled = {**called, **{(f"fc.p{i}", "update"): 1.0 for i in range(1, 10)}}
    found = judged(rule, records, range(200), lambda step: {**graded, **(sampled if step % 10 == 0 else {})})
    detail = (found[0].statistic, found[0].value, found[0].expected, found[0].score, found[0].detector, found[0].kind)
    said = FrozenRule.sentence(Anomaly(9, 0, 0, 0, "fc.p0", "update", *detail), "the update of fc.p0")
    assert (len(found), said.endswith(ending)) == (1, True)


def test_a_parameter_that_its_module_has_made_constant_is_not_named(records, rule, judged):
    weights = {(f"p{i}", "parameter"): 1.0 for i in range(10)}
    moving = {(f"p{i}", "update"): 1.0 for i in range(1, 10)}
    told = {("unwritten.p0", "unwritten.p0"): 4.0}
    assert judged(rule, records, range(20), lambda s: {**weights, **moving, **(told if s == 0 else {})}) == []


@pytest.mark.parametrize(("defined", "moving", "told"), [(9, 2, 0), (10, 9, 1)], ids=["a backbone", "one of ten"])
def test_series_that_are_defined_ahead_of_their_first_row_have_not_moved(defined, moving, told, records, rule, judged):
    """A recorder that is behind knows the series of records that wait: layers that are unfrozen later."""
    weights = {(f"p{i}", "parameter"): 1.0 for i in range(10)}
    records.step(500, {(f"p{i}", "update"): 1.0 for i in range(defined)})
    moved = {(f"p{i}", "update"): 1.0 for i in range(moving)}
    assert len(judged(rule, records, range(20), {**weights, **moved})) == told


@pytest.mark.parametrize(("first", "found_at"), [(40, []), (1000, [90])], ids=["late tokens", "never"])
def test_without_activations_an_expert_may_wait_for_its_first_token(first, found_at, records, rule, judged):
    """The others have a gradient at each step, and an update at every tenth, as by default."""
    parameters = {(f"p{i}", "parameter"): 1.0 for i in range(11)}

    def sizes(step):
        trained = [f"p{i}" for i in range(10)] + (["p10"] if step >= first else [])
        moved = {(name, "update"): 1e-3 for name in trained} if step % 10 == 0 else {}
        return {**parameters, **moved, **{(name, "gradient"): 1.0 for name in trained}}

    found = [f for step in range(130) for f in judged(rule, records, [step], sizes(step))]
    assert [f.step for f in found] == found_at


def expert(*, called, moved):
    sizes = {("top.output.0", "activation_output"): 1.0, ("top.weight", "update"): 1.0}
    if called:
        sizes["expert.output.0", "activation_output"] = 1.0
    if moved:
        sizes["expert.weight", "update"] = 1.0
    return sizes


@pytest.mark.parametrize(("called", "steps"), [(False, []), (True, [20])])
def test_an_expert_that_got_no_token_has_nothing_to_update_and_one_that_was_called_has(
    called, steps, records, rule, judged
):
    found = judged(rule, records, range(24), lambda s: expert(called=called or s < 20, moved=s < 20))
    assert [f.step for f in found] == steps


@pytest.mark.parametrize("sees_calls", [True, False])
def test_layers_that_rest_now_and_then_are_not_frozen(sees_calls, records, rule, judged):
    """LayerDrop leaves out another layer in each step, and one layer sometimes in two sampled steps in a row."""
    rests = (20, 80, 90, 150, 160, 170)

    def sizes(step):
        sampled = expert(called=step not in rests, moved=step not in rests) if step % 10 == 0 else {}
        calls = {key: 1.0 for key in sampled if key[1] == "activation_output"}
        shown = sampled if sees_calls else {key: 1.0 for key in sampled if key not in calls}
        return {("input.0", "activation_input"): 1.0, **shown}

    assert judged(rule, records, range(230), sizes) == []


@pytest.mark.parametrize("every", [1, 10])
def test_a_layer_that_is_called_and_not_updated_is_frozen_also_where_calls_are_sampled_seldom(
    every, records, rule, judged
):
    def sizes(step):
        sampled = expert(called=True, moved=step < 100) if step % every == 0 else {}
        return {("input.0", "activation_input"): 1.0, **sampled}

    assert [f.step for f in judged(rule, records, range(140), sizes)] == [100]


def test_a_parameter_that_is_updated_fewer_times_in_a_step_is_not_frozen(records, rule, judged):
    """A critic is updated five times for one update of the generator, later twice."""
    updates = lambda s: {(*U, n): 1.0 for n in range(5 if s < 12 else 2)}  # noqa: E731
    assert judged(rule, records, range(30), lambda s: {OTHER: 1.0, **updates(s)}) == []


def test_heads_that_are_trained_in_turns_are_not_frozen(records, rule):
    for step in range(60):
        head = ("heads.a.weight" if step % 2 else "heads.b.weight", "update")
        assert rule(records.step(step, {("trunk.weight", "update"): 1.0, head: 1.0})) == []


def test_a_module_that_was_never_seen_while_it_trained_does_not_excuse_its_parameter(records, rule, judged):
    found = judged(rule, records, range(24), lambda s: expert(called=s < 2, moved=s < 20))
    assert [f.step for f in found] == [20]


def test_a_module_that_is_first_called_in_the_step_where_its_updates_come_back_is_judged():
    """The optimizer leaves an expert out at a step, and a token first reaches it at the next."""
    records = Records()
    detection = Detection(records.table)
    router = {("router.output.0", "activation_output"): 1.0, ("router.weight", "update"): 1e-3}
    for step in range(30):
        called = {("expert.output.0", "activation_output"): 1.0} if step >= 26 else {}
        moved = {("expert.weight", "update"): 1e-3} if step != 25 else {}
        assert detection.judge(records.step(step, {**router, **called, **moved})) == []


@pytest.mark.parametrize(
    ("value", "clean", "says"),
    [
        (1.0, 2, "is zero at step 3, although it has a gradient"),
        (2.0, 2, "requires no gradient any more at step 3"),
        (
            5.0,
            -1,
            "parameter fc.weight has had a gradient since step 0, but no optimizer holds it: it is never updated",
        ),
        (6.0, 2, "fc.weight of the model was replaced at step 3, and its optimizer still holds the old one"),
    ],
)
def test_a_weight_that_an_update_did_not_write_to_is_frozen_at_that_step(records, rule, judged, value, clean, says):
    unwritten = ("unwritten.fc.weight", "unwritten.fc.weight")
    [found] = judged(rule, records, [3], {unwritten: value})
    assert (found.name, found.quantity, found.last_clean) == ("fc.weight", "update", clean)
    detail = (found.statistic, found.value, found.expected, found.score, found.kind, found.detector)
    anomaly = Anomaly(
        3 if found.step is None else found.step, 0, 0, 0, found.name, found.quantity, *detail, last_clean=clean
    )
    assert says in FrozenRule.sentence(anomaly, "the update of fc.weight")


@pytest.mark.parametrize(("value", "told"), [(1.0, 0), (2.0, 0), (5.0, 1), (6.0, 1)])
def test_a_skipped_step_excuses_a_weight_that_was_not_written_but_none_that_no_optimizer_holds(
    records, rule, judged, value, told
):
    unwritten = ("unwritten.fc.weight", "unwritten.fc.weight")
    assert len(judged(rule, records, [3], {unwritten: value}, skipped=True)) == told


def test_a_parameter_is_not_still_before_its_first_row(records, rule, judged):
    """Series are defined ahead of the records in which they come, where a recorder is behind."""
    records.step(0, {("late.weight", "parameter"): 1.0})
    names = [f"{i}.weight" for i in range(20)]
    sizes = {(name, quantity): 1.0 for name in names for quantity in ("parameter", "update")}
    assert judged(rule, records, range(30), sizes) == []


def test_all_weights_that_an_update_did_not_write_to_are_one_finding_and_a_skipped_step_has_none(records, rule, judged):
    nothing = ("unwritten", "unwritten")
    assert judged(rule, records, [3], {nothing: 1.0}, skipped=True) == []
    assert judged(rule, records, [4], {nothing: 1.0, RATE: 0.0}) == []
    assert [(f.name, f.quantity) for f in judged(rule, records, [5], {nothing: 1.0})] == [("all", "update")]


@pytest.mark.parametrize("value", [3.0, None], ids=["on purpose", "cut off"])
def test_a_backbone_that_is_frozen_on_purpose_is_not_told_by_its_missing_updates(value, records, rule, judged):
    backbone = [(f"body.{i}.weight", "update") for i in range(6)]

    def sizes(step):
        told = {("unwritten", "unwritten"): value} if step == 17 and value else {}
        return (
            {OTHER: 1.0, **(dict.fromkeys(backbone, 1.0) if step < 17 else {}), **told} if step % 2 == 0 or told else {}
        )

    found = judged(rule, records, range(40), sizes)
    assert sorted({f.step for f in found}) == ([] if value else [18])


def test_a_backbone_that_trains_again_is_followed_again(records, rule, judged):
    backbone = [(f"body.{i}.weight", "update") for i in range(6)]

    def sizes(step):
        lost = backbone[:1] if step >= 40 else []
        moved = {key: 1.0 for key in backbone if key not in lost}
        return {OTHER: 1.0, **moved, **({("unwritten", "unwritten"): 3.0} if step == 20 else {})}

    found = judged(rule, records, range(60), sizes)
    assert [(records.table.series[f.series_id].name, f.step) for f in found] == [("body.0.weight", 40)]


def test_after_a_drop_of_the_learning_rate_parameters_must_have_moved_by_the_new_one(records, rule, judged):
    """As the bias ahead of a batch norm, whose gradient is rounding, and whose update a smaller rate rounds away."""
    assert judged(rule, records, range(20), {G: 1.0, U: 1.0, RATE: 1.0}) == []
    assert judged(rule, records, range(20, 25), {G: 1.0, U: 0.0, RATE: 0.1}) == []
    assert judged(rule, records, range(25, 37), {G: 1.0, U: 1.0, RATE: 0.1}) == []
    assert [f.kind for f in judged(rule, records, [37], {G: 1.0, U: 0.0, RATE: 0.1})] == ["frozen"]


def test_a_parameter_without_elements_has_nothing_to_move(records, rule):
    weights = {(f"p{i}", "parameter"): 1.0 for i in range(10)}
    moving = {(f"p{i}", "update"): 1.0 for i in range(1, 10)}
    empty = records.table.layout_id(Layout((0, 3), "float32", 0))

    def emptied(record):
        of_p0 = [records.table.series[i].name == "p0" for i in record.ids]
        return replace(record, layouts=np.where(of_p0, empty, record.layouts).astype(np.int32))

    assert [f for step in range(20) for f in rule(emptied(records.step(step, {**weights, **moving})))] == []
