"""Collectives of two ranks are recorded with inputs and outputs and compared, and both ranks stop at one step."""

import functools
import inspect
import json

import numpy as np
import pandas as pd
import pytest
from mindspore import Tensor, nn
from mindspore.mint import distributed
from stopping_ranks import INF_STEP, WISH_STEP
from two_ranks import FAULT_STEP, STEPS, run_ranks
from written_files import fail, json_lines

import trainsentry
from trainsentry.monitor.offline.history import diagnose


def weights(table):
    return table[(table.name == "weight") & (table.step < FAULT_STEP)].drop(columns="order").reset_index(drop=True)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Return the folder of two ranks that have trained: starting them takes longer than all that they do."""
    out = tmp_path_factory.mktemp("ranks")
    run_ranks(out)
    return out


def test_collectives_of_two_ranks_are_recorded_and_compared(ran):
    whole = pd.read_csv(ran / "global" / "gradient_0-999.csv")
    alone = pd.read_csv(ran / "rank0" / "gradient_0-999.csv")
    pd.testing.assert_frame_equal(weights(whole), weights(alone)[weights(whole).columns])
    inputs, outputs = (
        [pd.read_csv(ran / f"rank{r}" / f"communication_{side}_0-999.csv") for r in range(2)]
        for side in ("input", "output")
    )
    for table in (*inputs, *outputs):
        calls = table[table.step == 0]
        assert calls.name.str.startswith("world.").all()
        assert sorted(calls.op.unique()) == ["all_gather", "all_reduce"]
        assert sorted(table.step.unique()) == list(range(STEPS))
    first = [t[(t.step == 0) & (t.name == "world.all_reduce.0")].iloc[0] for t in (*inputs, *outputs)]
    assert np.isclose(first[0]["mean"] + first[1]["mean"], first[2]["mean"])
    assert first[2]["mean"] == first[3]["mean"]
    assert (first[2]["sequence"], first[2]["bytes"]) == (0, 32)
    assert first[2]["seconds"] > 0
    told = json_lines(ran / "incidents.jsonl")
    [newest] = {incident["id"]: incident for incident in told}.values()
    assert (newest["rank"], newest["kind"], newest["step"]) == (1, "communication_mismatch", FAULT_STEP)
    assert newest["name"].startswith("world.all_reduce.")
    found = diagnose([ran / "rank0", ran / "rank1"], fail)
    assert [(i.rank, i.kind, i.first_seen) for i in found][:1] == [(1, "communication_mismatch", FAULT_STEP)]
    assert found[0].name.startswith("world.all_reduce.")


def test_two_ranks_stop_at_one_step(ran):
    ends = [json.loads((ran / f"ends{rank}.json").read_text()) for rank in range(2)]
    where = {what: [(end[what][0], *end[what][2:]) for end in ends] for what in ends[0]}
    assert where == {
        "asked": [("TrainingStopped", WISH_STEP + 1, WISH_STEP + 1)] * 2,
        "limit": [("OverflowLimitReached", INF_STEP + 2, INF_STEP + 2)] * 2,
        "debugger": [("OverflowLimitReached", INF_STEP, INF_STEP + 1)] * 2,
    }
    assert "rank 1: enough" in ends[0]["asked"][1]
    assert "2 overflowing calls on one rank" in ends[0]["debugger"][1]


def doubled(outputs, inputs):
    """Fill each output, as a kernel would."""
    for target, source in zip(outputs, inputs, strict=True):
        target.assign_value(source * 2)


COLLECTIVES = {
    "all_to_all": lambda one, two: ([one, two], [one + 1, two + 1]),
    "all_to_all_single": lambda one, two: (one, two),
    "reduce_scatter_tensor": lambda one, two: (one, two),
    "reduce_scatter": lambda one, two: (one, [one + 1, two + 1]),
    "all_gather_into_tensor": lambda one, two: (one, two),
}
"""Collectives that give before they take, with arguments."""


@pytest.mark.parametrize("name", COLLECTIVES)
def test_the_tensors_of_collectives_without_a_kernel_here_are_found(tmp_path, monkeypatch, name):
    real = getattr(distributed, name)

    @functools.wraps(real)
    def stood_in(given, taken, *args, **kwargs):
        assert list(inspect.signature(real).parameters)[:2] in (
            ["output", "input"],
            ["output_tensor", "input_tensor"],
            ["output_tensor_list", "input_tensor_list"],
            ["output", "input_list"],
        )
        outputs, inputs = (x if isinstance(x, list) else [x] for x in (given, taken))
        doubled(outputs, inputs[: len(outputs)])

    monkeypatch.setattr(distributed, name, stood_in)
    monkeypatch.setenv("MS_WORKER_NUM", "2")
    monkeypatch.setenv("TRAINSENTRY_MEET_AT", "off")
    model = nn.Dense(4, 2)
    config = {"output_dir": tmp_path, "collect": {"communication": {"every": 1}}}
    with trainsentry.TrainMonitor(config).watch(model) as monitor:
        for _ in range(2):
            given, taken = COLLECTIVES[name](*(Tensor(np.full(3, x, np.float32)) for x in (1.0, 5.0)))
            getattr(distributed, name)(given, taken)
            monitor.step()
        rows = monitor.records()
    assert getattr(distributed, name) is stood_in
    calls = rows[(rows.step == 1) & rows.quantity.str.startswith("communication")]
    went_in = taken if isinstance(taken, list) else [taken]
    means = {q: [float(m) for m in calls[calls.quantity == f"communication_{q}"]["mean"]] for q in ("input", "output")}
    assert means["input"] == [float(x.asnumpy().mean()) for x in went_in]
    came_out = given if isinstance(given, list) else [given]
    assert means["output"] == [float(x.asnumpy().mean()) for x in came_out]
    assert means["output"][0] == 2 * means["input"][0]
