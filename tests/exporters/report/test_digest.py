"""The digest of a run is small, holds verdict, evidence and pointers, and keeps to its schema whatever the run was."""

import json
import re

import pytest
import torch
from forked_scripts import Script, run_forked
from recorded_runs import CULPRIT, make_run
from tiny_models import flip_bit, mlp, train
from typer.testing import CliRunner
from written_files import fail

import trainsentry
from trainsentry.exporters.files.foreign_files import InputError
from trainsentry.exporters.files.json_files import append_lines, replace_json
from trainsentry.exporters.report import digest
from trainsentry.exporters.report.digest_data import DIGEST_BYTES, digest_of
from trainsentry.exporters.report.digest_text import markdown
from trainsentry.monitor.cli.app import app

SHIPPED = digest.__file__.removesuffix(".py") + ".schema.json"

KILLED = """
import os, sys, torch, trainsentry
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
monitor = trainsentry.TrainMonitor({"output_dir": sys.argv[1]}).watch(model, optimizer)
for step in range(3):
    optimizer.zero_grad(); loss = model(torch.ones(2, 4)).sum(); loss.backward()
    monitor.log(loss=loss); optimizer.step()
os.kill(os.getpid(), 9)
"""


def trained(out, steps, before_step=None):
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with trainsentry.TrainMonitor({"output_dir": str(out)}).watch(model, optimizer) as monitor:
        train(model, optimizer, steps, monitor, before_step=lambda step: before_step and before_step(model, step))
    return out


def clean(out):
    return trained(out, 12)


def with_incident(out):
    return trained(out, 30, lambda model, step: flip_bit(model[0].weight, 3) if step == 20 else None)


def without_steps(out):
    return trained(out, 0)


def of_several_ranks(out):
    return make_run(out, ranks=3)


def killed(out):
    run_forked({"killed": Script(KILLED, [out])})
    return out


def half_written(out):
    root = make_run(out)
    (root / "run.json").unlink()
    (root / "rank1" / "status.json").write_text('{"state": "runn')
    with (root / "incidents.jsonl").open("a") as file:
        file.write('{"id": 2, "summary": 5}\n{"id": 3')
    return root


def written(root):
    """Return the text of `report --format json`."""
    result = CliRunner().invoke(app, ["report", str(root), "--format", "json"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.stdout


@pytest.mark.parametrize(
    ("run", "status", "state"),
    [
        (clean, "clean", "finished"),
        (with_incident, "incidents", "finished"),
        (of_several_ranks, "incidents", "finished"),
        (killed, "clean", "crashed"),
        (without_steps, "no_steps", "finished"),
        (half_written, "incidents", "finished"),
    ],
)
def test_the_digest_of_every_run_keeps_to_the_schema_that_is_shipped(tmp_path, run, status, state):
    jsonschema = pytest.importorskip("jsonschema")
    root = run(tmp_path / "run")
    text = written(root)
    with open(SHIPPED, encoding="utf-8") as file:
        jsonschema.Draft202012Validator(json.load(file)).validate(json.loads(text))
    found = json.loads(text)
    assert (found["verdict"]["status"], found["run"]["state"]) == (status, state)
    assert len(text.encode()) <= DIGEST_BYTES + 1
    assert len(markdown(digest_of(root)).encode()) <= DIGEST_BYTES


def test_the_shipped_schema_is_that_of_the_code_and_every_field_is_required():
    with open(SHIPPED, encoding="utf-8") as file:
        shipped = json.load(file)
    assert shipped == digest.schema()
    for part in [shipped, *shipped["$defs"].values()]:
        assert part["additionalProperties"] is False
        assert set(part["required"]) == set(part["properties"])


def test_verdict_evidence_and_pointers_name_the_culprit(tmp_path):
    found = digest_of(make_run(tmp_path), fail)
    [incident] = found.incidents
    assert (incident.name, incident.suspects[0].name, found.verdict.earliest_step) == (CULPRIT, CULPRIT, 30)
    assert [(v.step, v.value, v.usual) for v in incident.first_values] == [(30, 500.0, 4.0)]
    assert (found.scalars[0].first, found.scalars[0].last) == (3.0, 2.61)
    places = [pointer.where for pointer in found.pointers]
    assert places[:3] == ["incidents.jsonl", "rank0/anomalies.jsonl", "rank0/gradient_*"]
    assert all(list(tmp_path.glob(place)) for place in places[:3])


def test_the_first_suspects_value_comes_before_those_of_series_that_follow_it(tmp_path):
    root = make_run(tmp_path)
    [line] = [json.loads(line) for line in (root / "rank0" / "anomalies.jsonl").read_text().splitlines()]
    replaced = [line | {"name": "head", "quantity": "activation_output"}, line, line | {"step": 31, "value": 700.0}]
    (root / "rank0" / "anomalies.jsonl").unlink()
    append_lines(root / "rank0" / "anomalies.jsonl", replaced)
    values = digest_of(root).incidents[0].first_values
    assert [(v.name, v.step) for v in values] == [(CULPRIT, 30), ("head", 30)]


def test_incidents_of_one_culprit_are_one_entry_with_the_steps_of_the_others(tmp_path):
    root = make_run(tmp_path)
    line = json.loads((root / "incidents.jsonl").read_text())
    append_lines(root / "incidents.jsonl", [line | {"id": n, "first_seen": 30 + n, "score": 1.0} for n in (5, 4)])
    found = digest_of(root)
    assert (found.verdict.incidents, len(found.incidents), found.incidents[0].repeats) == (3, 1, [34, 35])
    assert "again: step 34, 35." in markdown(found)


def test_a_digest_stays_small_however_many_ranks_incidents_and_long_names_there_are(tmp_path):
    name = "encoder." * 200 + "weight"
    root = make_run(tmp_path, name=name, ranks=2)
    line = json.loads((root / "incidents.jsonl").read_text())
    many = [line["suspects"][0] | {"evidence": "jumped " * 300, "rank": rank} for rank in range(8)]
    lines = [
        line | {"id": n + 1, "name": f"{name}{n}", "suspects": many, "summary": "it broke " * 500} for n in range(50)
    ]
    append_lines(root / "incidents.jsonl", lines)
    gaps = [{"sink": f"sink{n}", "first_step": 0, "last_step": 9, "reason": "full " * 99} for n in range(40)]
    for rank in range(100):
        replace_json(root / f"rank{rank}" / "status.json", {"state": "running", "step": 3, "gaps": gaps})
    found = digest_of(root)
    assert len(found.model_dump_json(indent=1).encode()) <= DIGEST_BYTES
    assert (found.incidents_left_out, found.ranks_left_out) == (50 - len(found.incidents), 100 - len(found.ranks))
    assert found.incidents


@pytest.mark.parametrize(
    "name", ["<img src=x onerror=alert(1)>", "a|b`c", "fc\x1b]0;owned\x07", "fc\ud800.weight", "a\n# b"]
)
def test_names_and_sentences_stay_text_in_a_ticket(tmp_path, name):
    text = markdown(digest_of(make_run(tmp_path, name=name)))
    outside = re.sub(r"`[^`\n]*`", "", text)
    assert "<img" not in outside
    assert not {c for c in text if ord(c) < 32 and c != "\n"}
    assert "\n# b" not in text
    json.loads(digest_of(tmp_path).model_dump_json())  # half a character breaks no encoder


def test_a_number_that_is_not_finite_is_null(tmp_path):
    root = make_run(tmp_path)
    with (root / "rank0" / "scalars_0-999.csv").open("a") as file:
        file.write("loss,40,0,nan\n")
    loss = digest_of(root).scalars[0]
    assert (loss.last_step, loss.last, loss.not_finite, loss.lowest) == (40, None, 1, 2.61)
    assert "not finite (step 40)" in markdown(digest_of(root))


def test_a_digest_goes_to_standard_output_or_to_a_file_and_the_page_stays_the_default(tmp_path):
    root, target = make_run(tmp_path / "run"), tmp_path / "ticket.md"
    assert CliRunner().invoke(app, ["report", str(root), "--format", "markdown", "-o", str(target)]).exit_code == 0
    assert target.read_text().startswith("# trainsentry: 1 incident, 1 critical.")
    assert not (root / "report.html").exists()
    assert CliRunner().invoke(app, ["report", str(root)]).exit_code == 0
    assert '"where":"report.html"' in digest_of(root).model_dump_json()


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(InputError):
        digest_of(tmp_path)
    assert CliRunner().invoke(app, ["report", str(tmp_path), "--format", "json"]).exit_code == 2
