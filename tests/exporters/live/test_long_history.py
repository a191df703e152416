"""A long history is answered from a few of its bytes: exactly where it is short, from windows where it is long."""

import numpy as np
import pytest
from recorded_runs import CULPRIT, make_run
from written_files import fail

from trainsentry.exporters.csv.finished_blocks import compact
from trainsentry.exporters.csv.table_parts import part_lines, tables_in
from trainsentry.exporters.live import layer_map, series_points
from trainsentry.exporters.live.layer_map import map_json, read_map
from trainsentry.exporters.live.series_index import series_of
from trainsentry.exporters.live.series_points import ALL_STEPS, points_of

STEPS = 2600


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of three blocks."""
    return make_run(tmp_path_factory.mktemp("long"), steps=STEPS, ranks=1)


@pytest.fixture
def files(run):
    """Its gradients."""
    return tables_in(run / "rank0", run)["gradient"]


def read_bytes(monkeypatch):
    """Count the bytes of lines that are parsed or searched."""
    counted = [0]

    def counting(*arguments, **settings):
        for header, lines in part_lines(*arguments, **settings):
            counted[0] += len(lines)
            yield header, lines

    monkeypatch.setattr("trainsentry.exporters.csv.part_rows.part_lines", counting)
    return counted


@pytest.mark.parametrize("step", [0, 1, 500, 998, 999, 1000, 2599])
def test_a_step_is_found_without_reading_the_others(files, step, monkeypatch):
    counted = read_bytes(monkeypatch)
    points = points_of(files, CULPRIT, "norm", fail, steps=range(step, step + 1))
    assert (points.steps.tolist(), points.whole) == ([step], True)
    assert counted[0] < 1000  # of a table of megabytes


def test_a_range_over_two_blocks_is_whole(files):
    points = points_of(files, "layers.1.mlp.weight", "norm", fail, steps=range(990, 1010))
    assert points.steps.tolist() == list(range(990, 1010))
    assert set(points.values.tolist()) == {2.0}


def test_of_many_points_the_extremes_and_what_is_not_finite_are_kept(files, monkeypatch):
    monkeypatch.setattr(series_points, "MAX_POINTS", 60)
    points = points_of(files, CULPRIT, "nans", fail)
    assert points.recorded == STEPS
    assert len(points.steps) <= 60
    assert points.steps[points.values == 1].tolist() == [31]


def test_a_history_too_long_to_read_is_sampled_evenly_and_incidents_are_read_in_any_case(files, monkeypatch):
    monkeypatch.setattr(series_points, "ALL_BYTES", 100_000)
    counted = read_bytes(monkeypatch)
    points = points_of(files, CULPRIT, "norm", fail, marked=[30, 1777])
    assert not points.whole
    assert counted[0] < 150_000
    assert {29, 30, 1777, STEPS - 1} <= set(points.steps.tolist())
    assert np.diff(points.steps).max() < STEPS / 10


def test_a_map_of_a_long_history_has_every_incident_and_most_columns(files, monkeypatch):
    monkeypatch.setattr(layer_map, "ALL_BYTES", 300_000)
    counted = read_bytes(monkeypatch)
    found = read_map(None, files, ALL_STEPS, [30], fail)
    assert not found.whole
    assert counted[0] < 500_000
    table = found.view.matrix.table()
    seen = ~np.isnan(table).all(axis=0)
    assert seen.mean() > 0.3
    row = found.view.matrix.names.index(CULPRIT)
    assert table[row, 0] == 1.0
    assert table[row, found.view.matrix.column_of(30)] >= 125.0


def test_a_map_goes_on_where_it_stopped(run, files, tmp_path, monkeypatch):
    whole = {f.path: f.path.read_bytes() for f in files}
    copies = make_run(tmp_path, steps=1, ranks=1)
    newest = max(files, key=lambda f: f.first)
    for path, data in whole.items():
        cut = data.rindex(b"\n", 0, len(data) // 2) + 7 if path == newest.path else len(data)
        (copies / "rank0" / path.name).write_bytes(data[:cut])
    own = tables_in(copies / "rank0", copies)["gradient"]
    first = read_map(None, own, ALL_STEPS, [], lambda *_: None)
    (copies / "rank0" / newest.path.name).write_bytes(whole[newest.path])
    parsed = []
    monkeypatch.setattr(first, "take", lambda rows, take=first.take: (parsed.append(rows.step), take(rows)))
    second = read_map(first, own, ALL_STEPS, [], fail)
    anew = read_map(None, own, ALL_STEPS, [], fail)
    assert second is first
    assert min(parsed) > 2000
    np.testing.assert_array_equal(second.view.matrix.table(), anew.view.matrix.table())


@pytest.mark.parametrize("form", ["parquet", "zstd"])
def test_compacted_blocks_answer_as_the_csv_did(run, files, tmp_path, form):
    pytest.importorskip("pyarrow" if form == "parquet" else "zstandard")
    copies = make_run(tmp_path, steps=STEPS, ranks=1)
    for path in sorted((copies / "rank0").glob("*_0-999.csv")):
        compact(path, form)
    own = tables_in(copies / "rank0", copies)
    for name, steps in ((CULPRIT, ALL_STEPS), ("layers.2.mlp.weight", range(900, 1100))):
        one, other = (points_of(f, name, "norm", fail, steps=steps) for f in (files, own["gradient"]))
        np.testing.assert_array_equal(one.steps, other.steps)
        np.testing.assert_array_equal(one.values, other.values)
    assert series_of(own, fail) == series_of(tables_in(run / "rank0", run), fail)


def test_a_compacted_history_too_long_to_read_is_sampled_too(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    copies = make_run(tmp_path, steps=STEPS, ranks=1)
    for path in sorted((copies / "rank0").glob("gradient*.csv")):
        compact(path, "parquet")
    own = tables_in(copies / "rank0", copies)["gradient"]
    monkeypatch.setattr(layer_map, "ALL_BYTES", 1000)
    found = map_json(read_map(None, own, ALL_STEPS, [30], fail))
    assert (found["whole"], found["layers"], found["last"]) == (False, 6, STEPS - 1)


def test_where_a_run_went_back_the_later_start_counts(tmp_path):
    run = make_run(tmp_path, steps=40, ranks=1)
    old = (run / "rank0" / "gradient_0-999.csv").read_text().splitlines()
    header, rows = old[0], [line for line in old[1:] if 20 <= int(line.split(",")[2]) < 30]
    changed = [
        line.replace("layers.1.mlp.weight", "other") for line in rows if "layers.3." in line or "layers.1." in line
    ]
    (run / "rank0" / "gradient_20-999.r1.csv").write_text("\n".join([header, *changed]) + "\n")
    own = tables_in(run / "rank0", run)["gradient"]
    assert points_of(own, "other", "norm", fail).steps.tolist() == list(range(20, 30))
    assert points_of(own, CULPRIT, "norm", fail).steps.tolist() == list(range(40))


def test_a_name_that_is_part_of_another_or_needs_quotes_is_found_alone(tmp_path):
    run = make_run(tmp_path, name='a,"b".weight', ranks=1)
    own = tables_in(run / "rank0", run)["gradient"]
    assert points_of(own, 'a,"b".weight', "norm", fail).steps.tolist() == list(range(30, 40))
    assert len(points_of(own, "mlp.weight", "norm", fail).steps) == 0


def test_a_link_out_of_the_run_is_no_table(run, tmp_path):
    inside = make_run(tmp_path / "inside", ranks=1)
    (inside / "rank0" / "stolen_0-999.csv").symlink_to(run / "rank0" / "gradient_0-999.csv")
    assert set(tables_in(inside / "rank0", inside)) == {"gradient", "scalars"}
