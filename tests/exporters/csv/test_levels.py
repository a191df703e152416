"""Levels hold every extreme of a table, whatever ended, failed or went back; few bytes of them show a long history."""

import math
import shutil

import numpy as np
import pytest
from recorded_runs import INCIDENT
from step_records import Records
from written_files import fail

from trainsentry.collectors.statistics import STATISTICS
from trainsentry.exporters.csv import level_catch_up, level_writer
from trainsentry.exporters.csv.level_files import history_parts, levels_of, rows_by_step
from trainsentry.exporters.csv.levels import WIDTHS
from trainsentry.exporters.csv.part_rows import part_lines
from trainsentry.exporters.csv.quota import enforce_quota
from trainsentry.exporters.csv.table_parts import tables_in
from trainsentry.exporters.csv.table_rows import RowKeys
from trainsentry.exporters.csv.writer import CsvWriter
from trainsentry.exporters.files.json_files import append_lines, replace_json
from trainsentry.exporters.live import layer_map, series_points
from trainsentry.exporters.live.layer_map import map_json, read_map
from trainsentry.exporters.live.series_points import ALL_STEPS, points_of
from trainsentry.exporters.report import history_rows
from trainsentry.exporters.report.data import gather

SPIKES = {37: 5e3, 901: 7e4, 1603: 1e-6}
"""Steps of one series that nothing else shows, and its size there; usually it is 1 to 2."""


def size(step, spikes=SPIKES):
    return spikes.get(step, 1.0 + (step % 7) / 7)


class Run:
    """Writes a rank's tables; a `killed` writer leaves the buckets that are open unwritten."""

    def __init__(self, directory):
        self.directory = directory
        self.restart = -1

    def write(self, steps, *, sizes=size, killed=False, same=False, every=1, **settings):
        self.restart += not same
        records = Records()
        writer = CsvWriter(
            self.directory,
            records.table,
            STATISTICS,
            levels=True,
            start_step=steps[0],
            restart=self.restart,
            **settings,
        )
        for n in steps:
            rows = {("layers.0.w", "gradient"): 1.0, ("layers.1.w", "gradient"): sizes(n), ("loss", "loss"): sizes(n)}
            if n % every == 0:
                rows["layers.1.w", "update"] = sizes(n)
            writer.write(records.step(n, rows))
        if killed:
            writer._levels = None
        writer.close()
        return self

    def extremes(self, table="gradient", allowed=0, steps=ALL_STEPS):
        """Return the lowest and the highest norm or value that the coarsest answer of `allowed` bytes shows, and it."""
        files = tables_in(self.directory, self.directory.parent)[table]
        for wanted in [allowed] if allowed else [2000 * 2**i for i in range(12)]:
            found = history_parts(files, levels_of(files), steps, wanted, fail)
            if found is not None:
                break
        keys, values = RowKeys(), []
        for rows, _ in rows_by_step(found.parts, keys, (), fail):
            norm = rows.numbers.index("value" if table == "scalars" else "norm")
            values += [
                v for k, v in zip(rows.keys, rows.values[:, norm], strict=True) if keys.keys[k].name != "layers.0.w"
            ]
        finite = [v for v in values if math.isfinite(v)]
        return min(finite), max(finite), found


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "rank0")


@pytest.mark.parametrize("table", ["gradient", "update", "scalars"])
def test_every_level_has_the_spikes_of_one_step_and_is_a_fraction_of_the_table(run, table):
    run.write(range(2500))
    files = tables_in(run.directory, run.directory)[table]
    whole = sum(f.path.stat().st_size for f in files)
    levels = levels_of(files)
    assert [len(of_level) for of_level in levels] == [width <= 2500 for width in WIDTHS]
    for width, [file] in zip(WIDTHS[:3], levels[:3], strict=True):
        assert file.path.stat().st_size < whole * 3 / width
        own = LevelFile(file.path)
        assert own.lowest == min(SPIKES.values())
        assert own.highest == max(SPIKES.values())
        assert (own.first, own.last) == (0, 2499)


class LevelFile:
    """The extremes of the one series in a level's file, and its ends."""

    def __init__(self, path):
        import pandas as pd

        table = pd.read_csv(path)
        table = table[table["name"] != "layers.0.w"]
        values = table["value" if "value" in table else "norm"]
        self.lowest, self.highest = values.min(), values.max()
        self.first, self.last = table["step"].iloc[0], table["step"].iloc[-1]


def test_a_short_run_has_no_level(run):
    run.write(range(64))
    assert not (run.directory / "levels").exists()


@pytest.mark.parametrize("every", [1, 10])
def test_an_answer_of_few_bytes_has_every_extreme_up_to_the_newest_step(run, every):
    newest = {**{(step // every) * every: value for step, value in SPIKES.items()}, 2490: 9e5}
    run.write(range(2500), sizes=lambda n: size(n, newest), every=every, killed=True)
    for table in ("gradient", "update", "scalars"):
        low, high, found = run.extremes(table)
        assert (low, high) == (1e-6, 9e5)
        assert found.width > 1 or every > 1
        assert found.cost < 120_000


def test_a_value_that_is_not_finite_stands_in_its_bucket_beside_the_largest_that_is(run):
    bad = {100: math.nan, 130: math.inf, 131: 4e4}
    run.write(range(300), sizes=lambda n: size(n, bad))
    points = points_of(levels_of(tables_in(run.directory, run.directory)["scalars"])[0], "loss", "value", fail)
    shown = dict(zip(points.steps.tolist(), points.values.tolist(), strict=True))
    assert math.isnan(shown[64])
    assert shown[128] == math.inf
    assert shown[191] == 4e4


@pytest.mark.parametrize("killed", [True, False])
@pytest.mark.parametrize("back", [0, 5, 40, 300])
def test_a_resumed_run_goes_on_with_its_levels_and_forgets_what_it_took_back(run, killed, back):
    lost = {999 - i: 1e9 for i in range(back)}
    run.write(range(1000), sizes=lambda n: size(n, SPIKES | lost), killed=killed)
    run.write(range(1000 - back, 2500), sizes=lambda n: size(n, SPIKES | {1005: 3e5}))
    low, high, found = run.extremes()
    assert (low, high) == (1e-6, 3e5)
    assert found.width >= 256
    assert found.cost < 40_000
    _, high, _ = run.extremes(steps=range(600))
    assert high == 5e3


def test_a_recorder_that_takes_over_makes_the_buckets_whole_that_were_open(run):
    run.write(range(930), killed=True)
    run.write(range(920, 2500), same=True)
    low, high, found = run.extremes()
    assert (low, high) == (1e-6, 7e4)
    assert found.cost < 40_000


def test_a_start_that_finds_too_much_to_make_up_for_leaves_the_table_without_levels(run, monkeypatch):
    run.write(range(900), killed=True)
    shutil.rmtree(run.directory / "levels")
    monkeypatch.setattr(level_catch_up, "CAUGHT_UP_BYTES", 10_000)
    run.write(range(900, 1200))
    assert not (run.directory / "levels").exists()


def test_trouble_with_levels_costs_no_row_and_they_come_back_with_the_next_block(run, monkeypatch):
    failing = [True]

    def append(self, *arguments, appended=level_writer.LevelWriter._append):
        if failing[0]:
            raise OSError("planted")
        appended(self, *arguments)

    monkeypatch.setattr(level_writer.LevelWriter, "_append", append)

    def sizes(n):
        failing[0] = n < 400
        return size(n)

    run.write(range(2500), sizes=sizes, steps_per_file=500)
    assert sum(len(p.read_text().splitlines()) - 1 for p in run.directory.glob("gradient*")) == 5000
    low, high, found = run.extremes()
    assert (low, high) == (1e-6, 7e4)
    assert found.cost < 40_000


def test_a_table_whose_series_are_too_many_has_no_levels(run, monkeypatch):
    monkeypatch.setattr("trainsentry.exporters.csv.levels.MAX_SERIES", 1)
    run.write(range(200))
    assert not list(run.directory.glob("levels/*/gradient*"))
    assert list(run.directory.glob("levels/64/scalars*"))


def test_levels_count_for_the_quota_and_their_finished_files_go_by_age(run):
    run.write(range(2500), steps_per_file=20)
    count = len(list(run.directory.glob("levels/64/*")))
    assert count > 6
    enforce_quota(run.directory, 1, 2499, [])
    left = list(run.directory.glob("levels/64/*"))
    assert 0 < len(left) < count
    assert all(p.stem.rpartition("-")[2] >= "2499" or int(p.stem.rpartition("-")[2]) >= 2499 for p in left)


@pytest.fixture
def long(run, monkeypatch):
    """A run that is too long to be read whole, by limits that are smaller than it."""
    run.write(range(6000), sizes=lambda n: size(n, SPIKES | {4501: 6e5}))
    for module, limit in ((series_points, 200_000), (layer_map, 200_000), (history_rows, 200_000)):
        monkeypatch.setattr(module, "ALL_BYTES", limit)
    read = [0]

    def counting(*arguments, **settings):
        for header, lines in part_lines(*arguments, **settings):
            read[0] += len(lines)
            yield header, lines

    monkeypatch.setattr("trainsentry.exporters.csv.part_rows.part_lines", counting)
    run.read = read
    return run


def test_the_live_page_shows_spikes_of_one_step_of_a_long_history_by_few_bytes(long):
    files = tables_in(long.directory, long.directory.parent)["gradient"]
    points = points_of(files, "layers.1.w", "norm", fail)
    assert (points.whole, points.bucket) == (False, 64)
    for step, value in (SPIKES | {4501: 6e5}).items():
        near = np.abs(points.steps - step) <= 64
        assert value in points.values[near], step
    assert long.read[0] < 200_000
    exact = points_of(files, "layers.1.w", "norm", fail, steps=range(4400, 4600))
    assert exact.whole
    assert exact.steps[exact.values == 6e5].tolist() == [4501]


def test_the_map_of_a_long_history_has_no_column_without_the_largest_value(long):
    files = tables_in(long.directory, long.directory.parent)["gradient"]
    found = read_map(None, files, ALL_STEPS, [], fail)
    matrix = found.view.matrix
    row = matrix.table()[matrix.names.index("layers.1.w")]
    assert row[matrix.column_of(4501) - 2 : matrix.column_of(4501) + 3].max() == np.float32(6e5 / 4)
    assert map_json(found, [])["bucket"] == 64
    assert long.read[0] < 250_000


def test_the_report_of_a_long_history_reads_few_bytes_and_has_the_spikes(long):
    root = long.directory.parent
    replace_json(root / "rank0" / "status.json", {"state": "closed", "rank": 0, "step": 5999})
    suspect = {"name": "layers.1.w", "quantity": "gradient", "rank": 0, "statistic": "norm"}
    append_lines(root / "incidents.jsonl", [INCIDENT | suspect | {"first_seen": 3000, "suspects": [suspect]}])
    data = gather(root, fail)
    steps, values = data.curves[0, "gradient", "norm"]["layers.1.w"]
    assert max(values) == 6e5
    assert {2998, 2999, 3000, 3001, 3002, 5999} <= set(steps)
    assert steps == sorted(steps)
    assert max(data.scalars["loss"][1]) == 6e5
    assert long.read[0] < 700_000  # three tables, of 2.4 MB


def test_levels_that_lie_elsewhere_or_are_damaged_are_left_out(run, tmp_path):
    other = Run(tmp_path / "other" / "rank0").write(range(2500), sizes=lambda n: 9e9)
    run.write(range(300))
    shutil.rmtree(run.directory / "levels")
    (run.directory / "levels").symlink_to(other.directory / "levels")
    files = tables_in(run.directory, tmp_path)["gradient"]
    assert not any(levels_of(files))
    (run.directory / "levels").unlink()
    folder = run.directory / "levels" / "64"
    folder.mkdir(parents=True)
    for damage in (b"", b"\0" * 100, b"vpp_stage,name,step\n0,a,x\n", b"name\n" + b'"' * 1000):
        (folder / "gradient_0-31999.csv").write_bytes(damage)
        found = history_parts(files, levels_of(files), ALL_STEPS, 10_000, lambda *_: None)
        assert found is None
        points = points_of(files, "layers.1.w", "norm", lambda *_: None)
        assert (points.whole, points.recorded) == (True, 300)
