"""Anomalies that belong together are one incident; its sentence says what, where and since when."""

from dataclasses import replace

import pytest

from trainsentry.anomaly.anomaly import Anomaly
from trainsentry.anomaly.incident import Incident
from trainsentry.anomaly.incidents.closed_incidents import AFTERMATH_STEPS, RETURN_STEPS
from trainsentry.anomaly.incidents.incident_log import QUIET_STEPS, IncidentLog
from trainsentry.collectors.series import Series, SeriesTable

HARD = Anomaly(5, 0, 0, 0, "fc.weight", "gradient", "nans", 3.0, 0.0, 1000.0, "nonfinite", "nonfinite", "fc", 4)
SOFT = replace(HARD, kind="spike", statistic="norm", value=50.0, expected=2.0, score=9.0, detector="spike")


def log(parameters=20):
    table = SeriesTable()
    for i in range(parameters):
        table.series_id(Series(f"p{i}", "parameter"))
    return IncidentLog(table)


def test_a_thousand_anomalies_of_one_cause_are_one_incident():
    incidents = log()
    for step in range(5, 25):
        incidents.observe(step, [replace(HARD, step=step, name=f"p{i}", order=i) for i in range(1000)])
    [incident] = incidents.incidents.values()
    assert (incident.first_seen, incident.last_seen) == (5, 24)
    assert len(incident.suspects) == 8


def test_only_news_is_returned():
    incidents = log()
    assert incidents.observe(5, [HARD]) is not None
    assert incidents.observe(6, [replace(HARD, step=6)]) is None
    assert incidents.observe(7, [replace(HARD, step=7, name="other")]) is not None


LATER = 5 + QUIET_STEPS + 1


def test_after_quiet_steps_trouble_elsewhere_is_a_new_incident():
    incidents = log()
    incidents.observe(5, [HARD])
    incidents.observe(LATER, [replace(HARD, step=LATER, name="head.weight")])
    assert [i.id for i in incidents.incidents.values()] == [1, 2]


def test_trouble_that_comes_back_in_the_same_place_is_the_same_incident():
    incidents = log()
    incidents.observe(5, [SOFT])
    for step in (LATER, 2 * LATER, 3 * LATER):
        again = incidents.observe(step, [replace(SOFT, step=step)])
        assert (again.id, again.first_seen, again.last_seen) == (1, 5, step)
    assert (again.again, again.returns) == ((LATER, 2 * LATER, 3 * LATER), 3)
    assert again.summary.endswith(f"Again at steps {LATER}, {2 * LATER}, {3 * LATER}.")
    assert Incident.from_json(again.to_json()) == again


def test_what_began_while_an_incident_lasted_and_is_told_late_belongs_to_it():
    """As the zeros of an output, which are known after several samples."""
    incidents = log()
    incidents.observe(5, [SOFT])
    for step in range(6, LATER):
        incidents.observe(step, [])
    changed = incidents.observe(LATER, [replace(SOFT, step=8, name="drop.output.0", quantity="activation_output")])
    assert (changed.id, changed.name, changed.again, changed.last_seen) == (1, "fc.weight", (), LATER)
    assert len(changed.suspects) == 2


def test_what_is_dated_before_an_incident_or_comes_beside_new_trouble_is_another():
    late = replace(SOFT, step=402, name="drop.output.0", quantity="activation_output")
    for alarms in ([replace(late, step=100)], [late, replace(SOFT, step=440, name="head.weight")]):
        incidents = log()
        incidents.observe(400, [replace(SOFT, step=400)])
        for step in range(401, 440):
            incidents.observe(step, [])
        incidents.observe(440, alarms)
        assert [i.id for i in incidents.incidents.values()] == [1, 2]


def test_what_somebody_sets_has_no_signs_before_it():
    """A gradient that was odd by itself five steps before the learning rate was set again is not its cause."""
    set_again = replace(SOFT, step=10, name="lr of group 0", quantity="optimizer", kind="option_change", module="")
    incidents = log()
    incidents.observe(5, [replace(SOFT, alarm=False)])
    incident = incidents.observe(10, [set_again])
    assert (incident.name, incident.step, len(incident.suspects)) == ("lr of group 0", 10, 1)


def test_what_is_certain_or_long_after_or_of_another_rank_is_no_return():
    for other in (
        replace(HARD, step=LATER),
        replace(SOFT, step=LATER, rank=1),
        replace(SOFT, step=5 + RETURN_STEPS + 1),
    ):
        incidents = log()
        incidents.observe(5, [SOFT])
        incidents.observe(other.step, [other])
        assert len(incidents.incidents) == 2


def test_state_and_weights_that_carry_an_incident_on_belong_to_it():
    incidents = log()
    incidents.observe(5, [HARD])
    carried = replace(SOFT, step=LATER, quantity="exp_avg_sq")
    assert incidents.observe(LATER, [carried]).id == 1
    assert incidents.observe(LATER + 2 * AFTERMATH_STEPS, [replace(carried, step=LATER + 2 * AFTERMATH_STEPS)]).id == 2


def test_a_spike_of_the_loss_that_passes_is_a_note_and_one_that_lasts_is_not():
    spike = replace(SOFT, name="loss", quantity="loss", module="", statistic="value")
    gradients = [replace(SOFT, name=f"p{i}", passed_on=True) for i in range(9)]
    incidents = log()
    assert incidents.observe(5, [spike, *gradients]).severity == "note"
    assert incidents.observe(LATER, [replace(a, step=LATER) for a in (spike, *gradients)]).severity == "note"
    lasting = log()
    found = [lasting.observe(step, [replace(spike, step=step), replace(SOFT, step=step, name=f"p{step}")])
             for step in (5, 6, 7, 8)]  # fmt: skip
    assert [incident.severity for incident in found] == ["note", "note", "warning", "warning"]


def test_a_spike_in_one_place_or_with_anything_else_is_no_note():
    spike = replace(SOFT, name="loss", quantity="loss", module="", statistic="value", order=5)
    assert log().observe(5, [SOFT, spike]).severity == "warning"
    assert log().observe(5, [spike, replace(SOFT, kind="dead", passed_on=True)]).severity == "warning"
    assert log().observe(5, [spike, replace(HARD, passed_on=True)]).severity == "critical"


def test_an_incident_lasts_until_the_slowest_rank_has_been_heard():
    """A recorder that is behind tells of the same trouble later, and one that is ahead earlier."""
    incidents = log()
    ahead, behind = 5 + 2 * QUIET_STEPS, 6
    incidents.observe(5, [HARD], reached=4)
    incidents.observe(ahead, [replace(HARD, step=ahead, rank=1)], reached=behind)
    incidents.observe(behind, [replace(HARD, step=behind)], reached=behind)
    [incident] = incidents.incidents.values()
    assert incident.last_seen == ahead
    late = ahead + QUIET_STEPS + 1
    incidents.observe(late, [replace(HARD, step=late, name="head.weight")], reached=late)
    assert len(incidents.incidents) == 2


def test_trouble_that_lasts_stays_so_where_its_first_step_is_heard_of_last():
    incidents = log()
    for step, kind in ((12, "spike"), (13, "shift"), (11, "spike")):
        incidents.observe(step, [replace(SOFT, step=step, kind=kind)])
    [incident] = incidents.incidents.values()
    assert (incident.step, incident.kind) == (11, "shift")


def test_of_ranks_that_are_alike_the_lowest_is_named_whichever_was_heard_first():
    found = [replace(HARD, rank=1), replace(HARD, rank=0)]
    assert [log().observe(5, order).rank for order in (found, found[::-1])] == [0, 0]


def test_of_two_replicas_that_part_the_one_that_was_changed_is_named_whatever_is_heard_first():
    tie = [replace(HARD, quantity="parameter", rank=r, kind="replica_mismatch", detector="replicas", statistic="bits",
                   value=1.0, expected=1.0, score=100.0) for r in (0, 1)]  # fmt: skip
    own = replace(tie[1], kind="shift", detector="continuity", statistic="mean", score=80.0)
    for parts in ([tie, [own]], [[own], tie]):
        incidents = log()
        for part in parts:
            incidents.observe(5, part)
        [incident] = incidents.incidents.values()
        assert (incident.rank, incident.kind) == (1, "replica_mismatch")
        assert [s.rank for s in incident.suspects] == [1, 0]


def test_a_suspicion_is_no_incident_and_joins_the_one_that_follows():
    suspicion = replace(SOFT, name="a.weight", alarm=False)
    both = log()
    assert both.observe(5, [suspicion]) is None
    incident = both.observe(7, [replace(SOFT, step=7)])
    assert [(s.name, s.step) for s in incident.suspects] == [("a.weight", 5), ("fc.weight", 7)]
    late = log()
    late.observe(5, [suspicion])
    assert len(late.observe(50, [replace(SOFT, step=50)]).suspects) == 1


def test_a_suspicion_long_before_an_open_incident_does_not_join_it():
    """A recorder that is behind tells of the fault first, and judges the steps before it afterwards."""
    behind = log()
    behind.observe(500, [replace(HARD, step=500)])
    behind.observe(480, [replace(SOFT, step=480, name="loss", quantity="loss", alarm=False)])
    [incident] = behind.incidents.values()
    assert [(s.name, s.step) for s in incident.suspects] == [("fc.weight", 500)]


def test_what_is_wrong_by_itself_needs_no_signs_before_it():
    both = log()
    both.observe(4, [replace(SOFT, step=4, name="a.weight", alarm=False)])
    assert both.observe(5, [HARD]).name == "fc.weight"


def test_a_spike_that_lasts_becomes_a_shift():
    one = log()
    assert one.observe(5, [SOFT]).kind == "spike"
    assert one.observe(8, [replace(SOFT, step=8, kind="shift")]).kind == "shift"


def test_the_sentence_says_what_where_since_when_and_what_followed():
    incidents = log()
    weight = replace(HARD, quantity="parameter", step=7, last_clean=0, order=3)
    incident = incidents.observe(7, [weight, replace(HARD, step=7, name="b", order=1)])
    assert incident.name == "fc.weight"
    assert incident.summary == (
        "Between step 1 and step 7 on rank 0: parameter fc.weight holds 3 NaN values at step 7; it was last healthy at "
        "step 0. 1 other series is also abnormal so far (1 × gradient)."
    )
    assert incident.severity == "critical"


def test_a_line_reads_back_as_the_same_incident():
    incident = log().observe(5, [HARD]).with_action("dump: somewhere")
    assert Incident.from_json(incident.to_json()) == incident
    line = incident.to_json()
    assert list(line) == [
        "id",
        "step",
        "rank",
        "name",
        "quantity",
        "statistic",
        "kind",
        "severity",
        "score",
        "summary",
        "suspects",
        "actions",
        "first_seen",
        "last_seen",
        "again",
        "returns",
    ]
    assert {"rank", "name", "quantity", "statistic", "kind", "score", "step", "evidence"} <= set(line["suspects"][0])


def test_a_cause_that_shows_late_is_found_among_thousands_of_effects_and_repeats_are_no_news():
    incidents = log(parameters=3000)
    effects = [replace(HARD, name=f"l{i}.w", order=i, last_clean=10) for i in range(6000)]
    news = 0
    for step in range(11, 60):
        found = [replace(a, step=step) for a in effects]
        if step >= 13:
            found.append(replace(HARD, name="l7.w", quantity="parameter", step=step, last_clean=5))
        news += incidents.observe(step, found) is not None
    [incident] = incidents.incidents.values()
    assert (incident.name, incident.quantity) == ("l7.w", "parameter")
    assert news == 2


def test_what_is_sampled_seldom_stays_one_incident():
    incidents = IncidentLog(log().table, quiet_steps=100)
    for step in range(0, 1000, 50):
        incidents.observe(step, [replace(HARD, step=step)])
    assert len(incidents.incidents) == 1


LEVEL = replace(SOFT, step=10, name="loss", quantity="loss", kind="shift", detector="level_shift", module="")


@pytest.mark.parametrize(("sampled", "said"), [(10, False), (12, False), (9, True), (None, True)])
def test_a_cause_was_not_sampled_only_where_no_activations_were_since_the_onset(sampled, said):
    """A level that begins at step 10 is told at step 13."""
    incidents = log()
    for step in range(13):
        incidents.observe(step, [], activations=step == sampled)
    told = incidents.observe(13, [LEVEL])
    assert ("its cause was not sampled" in told.summary) == said


@pytest.mark.parametrize(("value", "slowly"), [(2.5, True), (1.2, True), (9.0, False), (0.5, False)])
def test_what_has_leapt_is_not_said_to_change_slowly(value, slowly):
    told = log().observe(5, [replace(SOFT, kind="drift", detector="drift", value=value)])
    assert ("changes slowly" in told.summary) == slowly
