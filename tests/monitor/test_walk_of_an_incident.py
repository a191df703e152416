"""The way of one incident, from the recorder that finds it to the dump on disk, leads through few files."""

import sys
import threading
from pathlib import Path

import pytest
import torch
from tiny_models import mlp, train

import trainsentry
from trainsentry.monitor.recorder.link import RecorderLink
from trainsentry.monitor.recorder.start import ThreadRecorder

HOME = Path(trainsentry.__file__).parent.resolve().parent
FLIP = 13

MAX_PATH = 22
MAX_ALL = 40

BEGINNINGS = {("session.py", "take_record"), ("same_step.py", "judge"), ("step_loop.py", "_before")}
"""The functions below which a file is counted: the recorder takes a record, the trainer is about to update."""

CHANGES = {
    ("ranking.py", "rank"): "anomalies are ranked",
    ("sentence.py", "summary"): "and put into words",
    ("incident.py", "to_json"): "an incident is made",
    ("messages.py", "encode"): "and sent",
    ("messages.py", "feed"): "the trainer receives it",
    ("incident.py", "from_json"): "and reads it",
    ("consensus.py", "at_boundary"): "the ranks agree on it",
    ("targeted_dump.py", "now"): "a dump begins",
    ("tensor_capture.py", "held"): "the suspects' tensors are found",
    ("tensor_facts.py", "describe"): "described",
    ("private_files.py", "new_private_file"): "and saved, each in a file",
    ("growing_json.py", "close"): "dump.json is complete",
}
"""The functions in which the incident changes its form, in order."""

EXTENTS = {
    ("publisher.py", "take"),
    ("link.py", "wait_for_verdict"),
    ("triggers.py", "hear"),
    ("triggers.py", "act_before_update"),
}
"""The functions that do nothing but bring the incident on its way."""


def our_file(frame):
    path = Path(frame.f_code.co_filename)
    try:
        inside = path.resolve().relative_to(HOME).as_posix()
    except (OSError, ValueError):
        return None
    return None if inside.startswith("tests/") or not inside.endswith(".py") else inside


class Tracer:
    """Collects files of ours from the stacks of calls, from `begin` until the suspects' dump is written."""

    def __init__(self):
        self.path, self.everything, self.seen = [], set(), set()
        self.on = False
        self._names = {}

    def __call__(self, frame, event, _arg):
        if not self.on:
            return
        name = self._name(frame)
        if event == "return" and name == ("targeted_dump.py", "_write"):
            self.on = False
        if event != "call" or name is None:
            return
        stack = [frame]
        while (frame := frame.f_back) is not None:
            stack.append(frame)
        stack = [f for f in reversed(stack) if self._name(f) is not None]
        names = [self._name(f) for f in stack]
        begins = next((i for i, n in enumerate(names) if n in BEGINNINGS), None)
        if begins is None:
            return
        files = [our_file(f) for f in stack[begins:]]
        if name in CHANGES:
            self.seen.add(name)
            self.path = list(dict.fromkeys(self.path + files))
        if EXTENTS & set(names):
            self.everything.update(files)

    def _name(self, frame):
        code = frame.f_code
        if code not in self._names:
            self._names[code] = (Path(code.co_filename).name, code.co_name) if our_file(frame) else None
        return self._names[code]


@pytest.fixture(scope="module")
def walk(tmp_path_factory):
    """The tracer of a run whose weight becomes NaN, with the recorder in a thread."""
    out, tracer = tmp_path_factory.mktemp("walk"), Tracer()
    original = RecorderLink.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecorderLink, "__init__", lambda s, settings, table: original(s, settings, table, ThreadRecorder))
        threading.setprofile(tracer)
        try:
            torch.manual_seed(0)
            model = mlp()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            config = {"output_dir": str(out), "strict": True, "export": {"report": False}}
            monitor = trainsentry.TrainMonitor(config).watch(model, optimizer)
        finally:
            threading.setprofile(None)
        with monitor:
            train(model, optimizer, FLIP, monitor)
            monitor.flush()
            model[2].weight.detach()[1, 2] = float("nan")
            before = sys.getprofile()
            sys.setprofile(tracer)
            try:
                tracer.on = True
                train(model, optimizer, 1, monitor)
            finally:
                tracer.on = False
                sys.setprofile(before)
    assert (out / "dump" / f"step{FLIP}" / "rank0" / "dump.json").is_file()
    return tracer


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
    """At most 40 files run for the incident: those on the way and all that they ask, however small the question."""
    everything = walk.everything | set(walk.path)
    assert len(everything) <= MAX_ALL, "\n".join(sorted(everything))
