"""A run that trains is served by the real command: what it says is what the files say, also while they grow."""

import base64
import json
import time
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from forked_scripts import Script, start_forked
from recorded_runs import CULPRIT, make_run
from served import served
from written_files import fail, table

from trainsentry.exporters.maps.layers_map import NEUTRAL, NOT_FINITE
from trainsentry.exporters.report.data import gather
from trainsentry.exporters.report.sections import figures_of

pytest.importorskip("torch")
from broken_weight import FLIP, break_weight, make
from tiny_models import train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose weight breaks, recorded by a monitor; beside it a second run, and a folder that is none."""
    folder = tmp_path_factory.mktemp("runs")
    model, optimizer, monitor = make(folder / "job" / "broken", strict=False)
    with monitor:
        train(model, optimizer, FLIP + 4, monitor, before_step=break_weight(model))
    make_run(folder / "two_ranks", ranks=3)
    (folder / "notes").mkdir()
    (folder / "notes" / "secret.csv").write_text("name,step,micro_step,value\nsecret,1,0,1\n")
    return folder


@pytest.fixture(scope="module")
def server(run):
    """The server of these runs."""
    with served(run) as server:
        yield server


def test_the_runs_are_found_at_any_depth_and_nothing_else_is(server):
    status, answer = server.ask("runs")
    assert (status, {r["name"] for r in answer["runs"]}) == (200, {"job/broken", "two_ranks"})


def test_the_incident_is_the_one_in_the_files(server, run):
    _, state = server.ask("state", run="job/broken")
    line = json.loads((run / "job/broken/incidents.jsonl").read_text().splitlines()[-1])
    shown = next(i for i in state["incidents"] if i["id"] == line["id"])
    assert {key: shown[key] for key in ("name", "quantity", "step", "summary")} == {
        key: line[key] for key in ("name", "quantity", "step", "summary")
    }
    assert [i["id"] for i in state["incidents"]] == sorted(i["id"] for i in state["incidents"])
    assert [i["worst"] for i in state["incidents"]].count(True) == 1
    assert state["state"] == "finished"
    assert state["lag_steps"] == 0
    assert state["cost"]["share"] > 0


def test_a_series_is_found_by_words_and_has_the_numbers_of_the_table(server, run):
    _, found = server.ask("series", run="job/broken", words="GRADIENT 0.weight")
    series = next(s for s in found["found"] if s["table"] == "gradient")
    query = {"run": "job/broken", "table": series["table"], "name": series["name"], "statistic": "max"}
    _, points = server.ask("points", **query)
    rows = [row for row in table(run / "job/broken", 0, "gradient") if row["name"] == series["name"]]
    assert [(s, str(v)) for s, v in zip(points["steps"], points["values"], strict=True)] == [
        (int(r["step"]), str(float(f"{float(r['max']):.7g}"))) for r in rows
    ]
    _, part = server.ask("points", **query, first=3, last=5)
    assert (part["steps"], part["whole"]) == ([3, 4, 5], True)


def drawn(svg):
    """Return the names of a map's rows, its levels, shape (rows, columns), and its other data."""
    data = ET.fromstring(svg).attrib
    names = [name for name, _ in json.loads(data["data-rows"])]
    return names, np.frombuffer(base64.b64decode(data["data-levels"]), np.uint8).reshape(len(names), -1), data


def test_the_map_shows_the_culprit_alone_far_from_its_usual(server):
    _, found = server.ask("map", run="two_ranks", table="gradient")
    names, levels, data = drawn(found["svg"])
    row = names.index(CULPRIT)
    others = np.delete(levels, row, 0)
    assert set(others[:, 5:].ravel().tolist()) == {NEUTRAL}
    assert set(levels[row, 5:30].tolist()) == {NEUTRAL}
    assert levels[row, 30:32].tolist() == [2 * NEUTRAL, NOT_FINITE]
    assert (data["data-first"], data["data-last"], data["data-width"]) == ("0", "40", "1")
    assert f"{CULPRIT} #1" in "".join(ET.fromstring(found["svg"]).itertext())


def test_ranks_stand_beside_each_other_and_the_one_that_differs_shows(server):
    _, found = server.ask("ranks", run="two_ranks", table="gradient", name=CULPRIT, statistic="norm")
    names, levels, _ = drawn(found["svg"])
    assert names == ["rank 0", "rank 1", "rank 2"]
    assert levels[0, 30] == 2 * NEUTRAL
    assert set(levels[1:].ravel().tolist()) == {NEUTRAL}


def test_the_map_of_the_live_page_is_that_of_the_report(server, run):
    _, found = server.ask("map", run="two_ranks", table="gradient")
    shown = next(f for f in figures_of(gather(run / "two_ranks", fail)) if f.anchor == "map-gradient")
    ours, theirs = (drawn(svg) for svg in (found["svg"], shown.figure))
    np.testing.assert_array_equal(ours[1], theirs[1])
    assert (ours[0], ours[2]["data-levels"]) == (theirs[0], theirs[2]["data-levels"])


def test_a_run_that_begins_and_grows_after_the_server_is_shown_and_a_torn_line_costs_nothing(tmp_path):
    with served(tmp_path) as server:
        status, answer = server.ask("state")
        assert (status, "no run yet" in answer["error"]) == (404, True)
        make_run(tmp_path, steps=20)
        file = tmp_path / "rank0" / "gradient_0-999.csv"
        whole = file.read_bytes()
        cut = whole.rindex(b"\n", 0, -200) + 30  # in the middle of a line
        file.write_bytes(whole[:cut])
        (tmp_path / "incidents.jsonl").open("a").write('{"id": 2, "summary": "half')
        query = {"table": "gradient", "name": CULPRIT}

        def answered():
            for _ in range(300):  # the list of runs is kept for a moment
                status, answer = server.ask("map", table="gradient")
                if status == 200:
                    return answer
                time.sleep(0.1)
            raise AssertionError(answer)

        before = answered()
        file.write_bytes(whole)
        make_run(tmp_path / "other", steps=60)
        (tmp_path / "other" / "rank0" / file.name).replace(file)
        after = server.ask("map", table="gradient")[1]
        assert before["last"] < 20 <= after["last"]
        assert server.ask("points", **query)[1]["steps"] == list(range(60))
        state = server.ask("state")[1]
        assert any("incidents.jsonl:2" in line for line in state["problems"])


def test_what_is_asked_for_wrongly_is_answered_in_one_line(server):
    wrong = [
        ("state", {"run": "nowhere"}, "no such run"),
        ("state", {}, "several"),
        ("points", {"run": "two_ranks", "table": "secret", "name": "x"}, "no table"),
        ("points", {"run": "two_ranks", "rank": "7"}, "no rank7"),
        ("points", {"run": "two_ranks", "first": "-1"}, "not a step"),
        ("points", {"run": "two_ranks", "first": "5", "last": "4"}, "comes before"),
    ]
    for question, query, words in wrong:
        status, answer = server.ask(question, **query)
        assert (status, words in answer["error"], "\n" in answer["error"]) == (404, True, False), answer
    assert server.ask("points", run="two_ranks", name="no such series")[1]["steps"] == []


TRAINER = """
import sys, time, torch, trainsentry
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
monitor = trainsentry.TrainMonitor({"output_dir": sys.argv[1]}).watch(model, optimizer)
for step in range(5000):
    loss = model(torch.randn(16, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    if step == 40:
        model[2].weight.grad.fill_(float("nan"))
    monitor.log(loss=loss)
    optimizer.step()
    time.sleep(0.02)
"""


def test_a_run_is_shown_while_another_process_trains_and_when_that_is_killed(tmp_path):
    def wait(server, wanted):
        end = time.monotonic() + 120
        while time.monotonic() < end:
            status, state = server.ask("state", run="live")
            if status == 200 and wanted(state):
                return state
            time.sleep(0.2)
        raise AssertionError(state)

    with served(tmp_path) as server:
        trainer = start_forked(Script(TRAINER, [tmp_path / "live"]))
        try:
            first = wait(server, lambda state: state.get("step", -1) > 0)
            assert first["state"] == "running"
            later = wait(server, lambda state: state["step"] > first["step"] and state["incidents"])
            assert later["incidents"][0]["name"] == "2.weight"
        finally:
            trainer.kill()
            trainer.wait()
        assert wait(server, lambda state: state["state"] != "running")["state"] == "crashed"
