"""The way of a gradient, from the optimizer's hook to its row of CSV, leads through few files."""

import pytest
import torch
from tiny_models import mlp, train
from walk import Walk, files_of_the_walk, recorder_in_thread

import trainsentry
from trainsentry.collectors.torch.rows.described_tensors import compiled_read

pytestmark = pytest.mark.skipif(compiled_read is None, reason="no compiler, or a torch without DLPack's C functions")

STEP = 3
MAX_FILES = 18

CHANGES = {
    ("optimizer_steps.py", "_before"): "the optimizer is about to take the gradient",
    ("gradients.py", "owned"): "the parameters that it moves are known",
    ("gradient_reader.py", "_series"): "the gradient is a series",
    ("host_statistics.py", "read_described_at"): "its statistics are a row",
    ("step_rows.py", "peek"): "the step's rows are copied",
    ("outbox.py", "_build"): "and become a record",
    ("record.py", "parts"): "the record is bytes",
    ("ring.py", "write"): "in shared memory",
    ("ring.py", "read"): "the recorder reads them",
    ("record.py", "decode"): "they are a record again",
    ("session.py", "take_record"): "the session takes it",
    ("writers.py", "write"): "each exporter's thread gets it",
    ("writer.py", "write"): "it is written",
    ("format.py", "row_texts"): "as text",
    ("whole_writes.py", "append_whole"): "into a file",
}
"""The functions in which the gradient's number changes its form, in order."""

BEGINNINGS = {("optimizer_steps.py", "_before"), ("optimizer_steps.py", "_after"), ("loop.py", "serve")} | {
    ("writers.py", "_work")
}
"""The functions that begin a part of the way: the optimizer's hooks, the recorder, and an exporter's thread."""


@pytest.fixture(scope="module")
def walk(tmp_path_factory):
    """The walk of a step in which gradients alone are collected, with the recorder in a thread."""
    out, walk = tmp_path_factory.mktemp("walk"), Walk(CHANGES, BEGINNINGS)
    only_gradients = dict.fromkeys(("parameters", "optimizer_state", "updates", "activations"), False)
    config = {"output_dir": str(out), "strict": True, "detect": False, "collect": only_gradients}
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.MonkeyPatch.context() as patch,
        recorder_in_thread(patch, walk),
        trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor,
    ):
        train(model, optimizer, STEP, monitor)
        monitor.flush()
        with walk.watching():
            train(model, optimizer, 1)
        monitor.flush()
        walk.on = False
    rows = (out / "rank0" / "gradient_0-999.csv").read_text().splitlines()
    assert any(f",{STEP},0," in row for row in rows)
    return walk


def test_the_way_of_a_gradient_to_its_row_leads_through_few_files(walk):
    """At most 18 files stand on the way.

    A file stands on the way if one of its functions is on the call stack when the number changes its form
    (`CHANGES`): a reader who follows a gradient opens these files, one after the other. A file does not stand on the
    way if it only decides whether the step is sampled, or takes something else along.
    """
    assert walk.seen == set(CHANGES)
    assert len(walk.path) <= MAX_FILES, "\n".join(walk.path)


def test_the_guide_for_contributors_lists_these_files(walk):
    assert sorted(files_of_the_walk("A gradient")) == sorted(walk.path)
