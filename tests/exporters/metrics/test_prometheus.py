"""Metrics are few, counters start from zero and never fall, labels stay, and runs of one node keep apart."""

import json
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families
from recorded_runs import INCIDENT, make_run, running

from trainsentry.exporters.files.json_files import append_lines, replace_json
from trainsentry.exporters.metrics.prometheus import Metrics, Prometheus
from trainsentry.exporters.metrics.prometheus_families import registry_of, write_textfile


def samples(root, **options):
    """Return the values by name and labels, read by Prometheus' own parser from the textfile."""
    path = root / "metrics" / "run.prom"
    write_textfile(root, path, **options)
    families = list(text_string_to_metric_families(path.read_text()))
    assert len({family.name for family in families}) == len(families)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def value(found, name, **labels):
    [only] = [
        value
        for (known, pairs), value in found.items()
        if known == f"trainsentry_{name}" and labels.items() <= dict(pairs).items()
    ]
    return only


def test_metrics_hold_what_the_files_say_and_no_parameters_name(tmp_path):
    running(tmp_path, anomalies=3, lag_steps=4, lag_seconds=1.5)
    append_lines(tmp_path / "incidents.jsonl", [INCIDENT])
    (tmp_path / "rank0" / "scalars_0-999.csv").write_text("name,step,micro_step,value\nloss,7,0,2.5\n")
    found = samples(tmp_path)
    assert value(found, "step", rank="1") == 8
    assert value(found, "loss") == 2.5
    assert value(found, "recorder_lag_steps", rank="0") == 4
    assert value(found, "recorder_lag_seconds", rank="0") == 1.5
    assert value(found, "step_seconds", rank="0") == 0.25
    assert value(found, "last_incident_step") == 7
    assert value(found, "status_timestamp_seconds", rank="0") == pytest.approx(time.time(), abs=100)
    assert {dict(labels)["run"] for _, labels in found} == {str(tmp_path)}
    assert "fc" not in (tmp_path / "metrics" / "run.prom").read_text()


def test_every_counter_is_there_from_zero_so_that_the_first_incident_is_an_increase(tmp_path):
    before = samples(running(tmp_path))
    for name in ("incidents_total", "critical_incidents_total"):
        assert value(before, name) == 0
    for name in ("anomalies_total", "overflow_steps_total", "skipped_steps_total", "dropped_records_total"):
        assert value(before, name, rank="1") == 0
    append_lines(tmp_path / "incidents.jsonl", [INCIDENT])
    assert value(samples(tmp_path), "incidents_total") == 1


def test_a_new_ranking_moves_no_label_and_lets_no_counter_fall(tmp_path):
    running(tmp_path)
    totals, labels = [], set()
    lines = [
        INCIDENT,
        INCIDENT | {"severity": "critical", "kind": "nonfinite"},
        INCIDENT | {"kind": "shift"},
        INCIDENT | {"id": 2, "first_seen": 90},
    ]
    for line in lines:
        append_lines(tmp_path / "incidents.jsonl", [line])
        found = samples(tmp_path)
        labels.add(frozenset(found))
        totals.append((value(found, "incidents_total"), value(found, "critical_incidents_total")))
    assert totals == [(1, 0), (1, 1), (1, 1), (2, 1)]
    assert len(labels) == 1


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ({"state": "running"}, "running"),
        ({"state": "closed", "ended": "finished"}, "finished"),
        ({"state": "closed", "ended": "stopped"}, "stopped"),
        ({"state": "closed", "ended": "crashed"}, "crashed"),
        ({"state": "trainer gone"}, "crashed"),
    ],
)
def test_the_state_is_one_of_four_and_all_four_are_always_there(tmp_path, status, state):
    found = samples(running(tmp_path, **status))
    shown = {dict(labels)["state"]: value for (name, labels), value in found.items() if name.endswith("run_state")}
    assert shown == {"running": 0, "finished": 0, "stopped": 0, "crashed": 0} | {state: 1}


def test_the_last_textfile_says_how_the_run_ended_although_another_rank_still_ends(tmp_path):
    path = tmp_path / "metrics" / "run.prom"
    settings = Prometheus(port=None, textfile=str(path))
    running(tmp_path)
    first, second = (Metrics(settings, tmp_path, first=rank == 0) for rank in (0, 1))
    second.renew(now=True)
    assert not path.exists(), "a rank of another node must not begin a file there"
    first.renew()
    assert 'state="running"} 1.0' in path.read_text()
    replace_json(tmp_path / "rank0" / "status.json", {"state": "closed", "ended": "finished"})
    first.renew(now=True)
    assert 'state="finished"} 1.0' in path.read_text()
    replace_json(tmp_path / "rank1" / "status.json", {"state": "trainer gone"})
    second.renew(now=True)
    assert 'state="crashed"} 1.0' in path.read_text()


def test_two_runs_of_a_node_have_files_and_labels_of_their_own(tmp_path):
    folder = tmp_path / "textfiles"
    settings = Prometheus(port=None, textfile=f"{folder}/")
    for name in ("a", "b"):
        Metrics(settings, make_run(tmp_path / name / "out"), first=True).renew(now=True)
    texts = [path.read_text() for path in sorted(folder.iterdir())]
    assert len(texts) == 2
    seen = [
        {(s.name, tuple(s.labels.items())) for family in text_string_to_metric_families(text) for s in family.samples}
        for text in texts
    ]
    assert seen[0]
    assert not seen[0] & seen[1]


def test_a_run_can_have_a_name(tmp_path):
    assert registry_of(running(tmp_path), "gpt-7").get_sample_value("trainsentry_ranks", {"run": "gpt-7"}) == 2


def test_very_many_ranks_are_shown_by_their_extremes_under_the_same_label(tmp_path):
    for rank in range(70):
        replace_json(tmp_path / f"rank{rank}" / "status.json", {"state": "running", "step": rank})
    found = samples(tmp_path)
    assert value(found, "step", rank="max") == 69
    assert value(found, "step", rank="min") == 0
    assert not [labels for _, labels in found if dict(labels).get("rank") == "3"]


def test_lines_that_others_edited_cost_nothing_but_themselves(tmp_path):
    running(tmp_path)
    lines = [{"id": "x"}, {"id": 3, "first_seen": "late"}, {"id": [1]}, INCIDENT]
    (tmp_path / "incidents.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + "half")
    assert value(samples(tmp_path), "incidents_total") == 1
