"""A name that no file can hold switches no writer off: its unwritable characters are escaped."""

import json

import numpy as np
import pytest
from step_records import Records
from written_files import fail, scalars

from trainsentry.anomaly.incident import Incident, Suspect
from trainsentry.collectors.calls.gradient_summary import Gradient, GradientSummary
from trainsentry.collectors.series import Series, SeriesTable
from trainsentry.collectors.statistics import COLUMNS, STATISTICS
from trainsentry.exporters.csv.reader import read_table, table_files
from trainsentry.exporters.csv.writer import CsvWriter
from trainsentry.exporters.dumps.dump_reader import read_dumps
from trainsentry.exporters.dumps.step_dump import StepDump
from trainsentry.exporters.tensorboard.writer import TensorBoardWriter

NAMES = {"fc\ud800.weight": "fc\\ud800.weight", "a\0b": "a\\x00b", "\udfff\ud800": "\\udfff\\ud800"}


@pytest.mark.parametrize(("name", "written"), NAMES.items())
def test_tables_are_written_and_read_back(tmp_path, name, written):
    records = Records()
    writer = CsvWriter(tmp_path, records.table, STATISTICS)
    writer.write(records.step(0, {(name, "gradient"): 1.0, ("b", "gradient"): 2.0, (name, name): 3.0}))
    writer.close()
    tables = table_files(tmp_path)
    assert [r.name for rows in read_table(tables["gradient"], fail) for r in rows] == [written, "b"]
    assert [r.name for rows in read_table(tables["scalars"], fail) for r in rows] == [written]


@pytest.mark.parametrize(("name", "written"), NAMES.items())
def test_event_files_are_written_and_read_back(tmp_path, name, written):
    records = Records()
    writer = TensorBoardWriter(tmp_path, records.table, STATISTICS, renew_every=1)
    for n in range(3):
        writer.write(records.step(n, {(name, "gradient"): 1.0, ("b", "gradient"): 2.0, (name, name): 3.0}))
    suspect = Suspect(1, 0, name, "gradient", "norm", "spike", 9.0, "", name)
    incident = Incident(1, 1, 0, name, "gradient", "norm", "spike", "critical", 9.0, name, (suspect,), (name,), 1, 1)
    writer.write_incident(incident)
    writer.write_settings({"configuration": {name: name}})
    writer.close()
    assert {f"gradient.norm/{written}", "gradient.norm/b", f"scalars/{written}"} <= set(scalars(tmp_path))


@pytest.mark.parametrize(("name", "written"), NAMES.items())
def test_dumps_are_written_and_their_tensors_found_again(tmp_path, name, written):
    dump = StepDump(tmp_path, {"task": "tensor"})
    path = dump.tensor_path(f"Module.{name}.input.0.npy")
    np.save(path, np.ones(2))
    facts = {"dtype": "float32", "shape": [2], "data_name": path.name}
    dump.entry(f"Module.{name}", {"input": [facts]})
    dump.stack(f"Module.{name}", 0, [f"File {name}"])
    dump.parent(f"Module.{name}", None)
    dump.close()
    [found] = read_dumps(tmp_path, fail)
    [call] = found.calls
    [tensor] = found.tensors(call)
    assert found.path_of(tensor) == tmp_path / "dump_tensor_data" / f"Module.{written}.input.0.npy"


def test_gradients_of_a_step_are_written(tmp_path):
    for name in NAMES:
        gradient = Gradient(name, np.ones(2), lambda: b"x", np.zeros(COLUMNS), (2,))
        GradientSummary(tmp_path, "L1", ()).write(0, [gradient])
    assert {p.stem for p in (tmp_path / "step0").iterdir()} == set(NAMES.values())


def test_a_series_is_known_by_the_name_that_it_was_given_and_by_what_is_written():
    table = SeriesTable()
    series = Series("fc\ud800", "gradient", module="fc\ud800")
    assert table.series_id(series) == table.series_id(series) == table.known_id(series) == 0
    assert table.series[0] == Series("fc\\ud800", "gradient", module="fc\\ud800")
    other = SeriesTable()
    other.define(json.loads(json.dumps(table.definitions())))
    assert other.series == table.series
