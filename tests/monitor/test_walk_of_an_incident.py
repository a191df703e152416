"""The way of one incident, from the recorder that finds it to the dump on disk, leads through few files."""

import pytest
import torch
from tiny_models import mlp, train
from walk import Walk, files_of_the_walk, recorder_in_thread

import trainsentry

DUMPED = ("targeted_dump.py", "_write")
FLIP = 13

MAX_PATH = 22
MAX_ALL = 46

BEGINNINGS = {("session.py", "take_record"), ("same_step.py", "judge"), ("step_loop.py", "_before")}
"""The functions below which a file is counted: the recorder takes a record, the trainer is about to update."""

CHANGES = {
    ("ranking.py", "rank"): "anomalies are ranked",
    ("nonfinite.py", "sentence"): "the rule says each in a sentence",
    ("sentence.py", "summary"): "and the incident as a whole",
    ("incident.py", "to_json"): "an incident is made",
    ("messages.py", "encode"): "and sent",
    ("messages.py", "feed"): "the trainer receives it",
    ("incident.py", "from_json"): "and reads it",
    ("consensus.py", "at_boundary"): "the ranks agree on it",
    ("targeted_dump.py", "now"): "a dump begins",
    ("tensor_capture.py", "model_tensors"): "the suspects' tensors are found",
    ("tensor_facts.py", "describe"): "described",
    ("private_files.py", "new_private_file"): "and saved, each in a file",
    ("step_dump.py", "close"): "dump.json is complete",
}
"""The functions in which the incident changes its form, in order."""

EXTENTS = {
    ("publisher.py", "take"),
    ("link.py", "wait_for_verdict"),
    ("triggers.py", "receive"),
    ("triggers.py", "act_before_update"),
}
"""The functions that do nothing but bring the incident on its way."""


@pytest.fixture(scope="module")
def walk(tmp_path_factory):
    """The walk of an incident in a run whose weight becomes NaN, with the recorder in a thread."""
    out, walk = tmp_path_factory.mktemp("walk"), Walk(CHANGES, BEGINNINGS, EXTENTS, until=DUMPED)
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {"output_dir": str(out), "strict": True, "export": {"report": False}}
    with (
        pytest.MonkeyPatch.context() as patch,
        recorder_in_thread(patch, walk),
        trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor,
    ):
        train(model, optimizer, FLIP, monitor)
        monitor.flush()
        model[2].weight.detach()[1, 2] = float("nan")
        with walk.watching():
            train(model, optimizer, 1, monitor)
        walk.on = False
    assert (out / "dump" / f"step{FLIP}" / "rank0" / "dump.json").is_file()
    return walk


def test_the_way_of_an_incident_to_its_dump_leads_through_few_files(walk):
    """At most 22 files stand on the way.

    A file stands on the way if one of its functions is on the call stack when the incident changes its form
    (`CHANGES`): a reader who follows the incident opens these files, one after the other. Stacks are cut off above
    `BEGINNINGS`. A file does not stand on the way if it only answers a question between two changes, such as whether a
    name can be a file's, or if it takes the incident elsewhere, such as into `incidents.jsonl`.
    """
    assert walk.seen == set(CHANGES)
    assert len(walk.path) <= MAX_PATH, "\n".join(walk.path)


def test_all_files_that_run_for_an_incident_are_not_many_more(walk):
    """At most 46 files run for the incident: those on the way and all that they ask, however small the question."""
    everything = walk.everything | set(walk.path)
    assert len(everything) <= MAX_ALL, "\n".join(sorted(everything))


def test_the_guide_for_contributors_lists_these_files(walk):
    assert sorted(files_of_the_walk("An incident")) == sorted(walk.path)
