"""The way of a gradient, from the optimizer's hook to its row of CSV, leads through few files."""

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
STEP = 3
MAX_FILES = 18

CHANGES = {
    ("optimizer_steps.py", "_before"): "the optimizer is about to take the gradient",
    ("gradients.py", "owned"): "the parameters that it moves are known",
    ("host_rows.py", "id_of"): "the gradient is a series",
    ("host_statistics.py", "read_many_at"): "its statistics are a row",
    ("host_rows.py", "_plain_layout"): "with shape and dtype",
    ("step_rows.py", "peek"): "the step's rows are copied",
    ("outbox.py", "build"): "and become a record",
    ("record.py", "parts"): "the record is bytes",
    ("ring.py", "write"): "in shared memory",
    ("ring.py", "read"): "the recorder reads them",
    ("record.py", "decode"): "they are a record again",
    ("writer.py", "write"): "it is written",
    ("number_text.py", "row_texts"): "as text",
    ("whole_writes.py", "append_whole"): "into a file",
}
"""The functions in which the gradient's number changes its form, in order."""


def our_file(frame):
    path = Path(frame.f_code.co_filename)
    try:
        inside = path.resolve().relative_to(HOME).as_posix()
    except (OSError, ValueError):
        return None
    return None if inside.startswith("tests/") or not inside.endswith(".py") else inside


class Tracer:
    """Collects the files of ours on the call stacks of the changes."""

    def __init__(self):
        self.path, self.seen, self._names = [], set(), {}
        self.on = False

    def __call__(self, frame, event, _arg):
        name = self._name(frame) if self.on and event == "call" else None
        if name not in CHANGES:
            return
        self.seen.add(name)
        files = []
        while frame is not None:
            if self._name(frame) is not None:
                files.append(our_file(frame))
            frame = frame.f_back
        self.path = list(dict.fromkeys(self.path + files[::-1]))

    def _name(self, frame):
        code = frame.f_code
        if code not in self._names:
            self._names[code] = (Path(code.co_filename).name, code.co_name) if our_file(frame) else None
        return self._names[code]


@pytest.fixture(scope="module")
def walk(tmp_path_factory):
    """The tracer of a step in which gradients alone are collected, with the recorder in a thread."""
    out, tracer = tmp_path_factory.mktemp("walk"), Tracer()
    original = RecorderLink.__init__
    only_gradients = dict.fromkeys(("parameters", "optimizer_state", "updates", "activations"), False)
    config = {"output_dir": str(out), "strict": True, "detect": False, "collect": only_gradients}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecorderLink, "__init__", lambda s, settings, table: original(s, settings, table, ThreadRecorder))
        threading.setprofile(tracer)  # of the recorder's threads
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
            train(model, optimizer, STEP, monitor)
            monitor.flush()
            before = sys.getprofile()
            sys.setprofile(tracer)
            try:
                tracer.on = True
                train(model, optimizer, 1)
                sys.setprofile(before)
                monitor.flush()
            finally:
                tracer.on = False
                sys.setprofile(before)
                threading.setprofile(None)
    rows = (out / "rank0" / "gradient_0-999.csv").read_text().splitlines()
    assert any(f",{STEP},0," in row for row in rows)
    return tracer


def test_the_way_of_a_gradient_to_its_row_leads_through_few_files(walk):
    """At most 18 files stand on the way.

    A file stands on the way if one of its functions is on the call stack when the number changes its form
    (`CHANGES`): a reader who follows a gradient opens these files, one after the other. A file does not stand on the
    way if it only decides whether the step is sampled, or takes something else along.
    """
    assert walk.seen == set(CHANGES)
    assert len(walk.path) <= MAX_FILES, "\n".join(walk.path)
