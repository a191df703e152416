"""Ten thousand series need ten cards: numbers over all layers, pictures, incidents, and few tags."""

import io
import math

import numpy as np
import pytest
from PIL import Image
from step_records import Records
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from written_files import fail

from trainsentry.anomaly.incident import Incident, Suspect
from trainsentry.collectors.statistics import STATISTICS
from trainsentry.exporters.convert.csv2tb import csv2tb
from trainsentry.exporters.csv.writer import CsvWriter
from trainsentry.exporters.tensorboard.heatmap import _BAD, colours, picture
from trainsentry.exporters.tensorboard.layer_matrix import LayerMatrix
from trainsentry.exporters.tensorboard.writer import TensorBoardWriter


def reader(directory):
    made = EventAccumulator(str(directory), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
    made.Reload()
    return made


def layers(n, size=lambda i: 4.0):
    return {(f"layers.{i}.weight", "gradient"): size(i) for i in range(n)}


def test_numbers_over_all_layers_are_right(tmp_path):
    records = Records()
    writer = TensorBoardWriter(tmp_path, records.table, STATISTICS)
    writer.write(records.step(0, layers(3, lambda i: 4.0 * (i + 1)) | {("loss", "loss"): 1.0}))  # 16 elements each
    writer.write(records.step(1, layers(3, lambda i: math.nan if i == 1 else 8.0)))
    writer.close()
    found = reader(tmp_path)

    def values(name):
        return [e.value for e in found.Scalars(f"layers.gradient/{name}")]

    assert values("norm_of_all") == pytest.approx([math.sqrt(16 + 64 + 144), math.sqrt(64 + 1 + 64)], rel=1e-6)
    assert values("rms_max")[0] == 3.0
    assert values("rms_median")[0] == 2.0
    assert values("rms_min")[0] == 1.0
    assert values("not_finite") == [0.0, 1.0]


def test_more_series_than_tags_are_allowed_are_shown_together_only(tmp_path):
    records = Records()
    writer = TensorBoardWriter(tmp_path, records.table, STATISTICS, max_raw_tags=50)
    for n in range(3):
        writer.write(records.step(n, layers(10) | {("loss", "loss"): 1.0}))
    writer.close()
    tags = reader(tmp_path).Tags()["scalars"]
    assert "scalars/loss" in tags
    assert not [tag for tag in tags if tag.startswith("gradient.")]
    assert "layers.gradient/rms_max" in tags


def test_raw_names_the_series_that_are_shown_singly(tmp_path):
    records = Records()
    writer = TensorBoardWriter(tmp_path, records.table, ("norm",), raw=["layers.1.*"])
    writer.write(records.step(0, layers(3)))
    writer.close()
    tags = reader(tmp_path).Tags()["scalars"]
    assert [tag for tag in tags if tag.startswith("gradient.")] == ["gradient.norm/layers.1.weight"]


def test_pictures_are_renewed_and_the_overview_names_every_quantity(tmp_path):
    records = Records()
    writer = TensorBoardWriter(tmp_path, records.table, STATISTICS, renew_every=10)
    for n in range(25):
        writer.write(records.step(n, layers(4)))
    writer.close()
    found = reader(tmp_path)
    pictures = found.Images("heatmaps/gradient")
    assert len(pictures) == 3  # at 10, at 20, at the end
    assert Image.open(io.BytesIO(pictures[-1].encoded_image_string)).size == (pictures[-1].width, pictures[-1].height)
    layout = layout_pb2.Layout.FromString(found.Tensors("custom_scalars__config__")[-1].tensor_proto.string_val[0])
    assert layout.category[0].title == "Overview"
    assert "gradient" in [chart.title for chart in layout.category[1].chart]
    assert found.Tensors("layers.gradient/log10_rms")


def test_a_layer_that_is_not_finite_for_one_step_shows_however_long_the_run(tmp_path):
    matrix = LayerMatrix(max_columns=64)
    rows = matrix.rows_of([f"l{i}" for i in range(5)])
    for step in range(5000):
        values = np.full(5, 1.0)
        if step == 3210:
            values[2] = np.nan
        matrix.take(step, rows, values)
    table = matrix.table()
    assert table.shape[1] <= 64
    assert np.isinf(table[2, matrix.column_of(3210)])
    assert np.isinf(table).sum() == 1
    rgb, _, _ = colours(table)
    assert tuple(rgb[2, matrix.column_of(3210)]) == _BAD


def test_an_incident_is_marked_where_it_was(tmp_path):
    matrix = LayerMatrix()
    rows = matrix.rows_of(["a", "b"])
    for step in range(40):
        matrix.take(step, rows, np.asarray([1.0, 2.0]))
    plain = picture(matrix, "t")[0]
    marked = picture(matrix, "t", [7])[0]
    difference = np.asarray(Image.open(io.BytesIO(plain)), int) - np.asarray(Image.open(io.BytesIO(marked)), int)
    where = np.flatnonzero(np.abs(difference).sum(axis=(0, 2)))
    centre = 190 + 7 * 8 + 4
    assert abs((where.min() + where.max()) / 2 - centre) <= 1


def test_an_incident_arrives_as_text_that_shows_names_as_they_are(tmp_path):
    records = Records()
    writer = TensorBoardWriter(tmp_path, records.table, STATISTICS)
    writer.write(records.step(3, layers(1)))
    name = "<script>alert(1)</script>"
    suspect = Suspect(3, 0, name, "gradient", "norm", "spike", 60.0, "", "it is *ten* times its usual")
    incident = Incident(
        1, 3, 0, name, "gradient", "norm", "spike", "warning", 60.0, f"the gradient of {name} jumped", (suspect,),
        ("dump: dump/step3/rank0 (4 tensors)",), 3, 3,
    )  # fmt: skip
    writer.write_incident(incident)
    writer.close()
    found = reader(tmp_path)
    text = found.Tensors("incidents/1")[0].tensor_proto.string_val[0].decode()
    assert "<script>" not in text
    assert "&lt;script&gt;" in text
    assert "dump/step3/rank0" in text
    assert [e.value for e in found.Scalars("scalars/incidents")] == [1.0]


def test_a_conversion_has_the_same_pages_and_numbers(tmp_path):
    records = Records()
    live = TensorBoardWriter(tmp_path / "live", records.table, STATISTICS)
    csv = CsvWriter(tmp_path / "run" / "rank0", records.table, STATISTICS)
    for n in range(12):
        record = records.step(n, layers(6, lambda i, n=n: 1.0 + i + n))
        live.write(record)
        csv.write(record)
    live.close()
    csv.close()
    csv2tb(tmp_path / "run", tmp_path / "out", fail)
    ours, theirs = reader(tmp_path / "live"), reader(tmp_path / "out" / "rank0")
    for name in ("norm_of_all", "rms_max", "rms_median"):
        tag = f"layers.gradient/{name}"
        assert [e.value for e in ours.Scalars(tag)] == [e.value for e in theirs.Scalars(tag)]
    assert (
        ours.Images("heatmaps/gradient")[-1].encoded_image_string
        == theirs.Images("heatmaps/gradient")[-1].encoded_image_string
    )
    assert "custom_scalars__config__" in theirs.Tags()["tensors"]


def test_a_conversion_of_very_many_series_shows_them_together(tmp_path):
    records = Records()
    csv = CsvWriter(tmp_path / "run" / "rank0", records.table, STATISTICS)
    for n in range(3):
        csv.write(records.step(n, layers(20)))
    csv.close()
    done = csv2tb(tmp_path / "run", tmp_path / "out", fail, raw_tags=100)
    assert done.too_many == 1
    assert {tag.partition("/")[0] for tag in reader(tmp_path / "out" / "rank0").Tags()["scalars"]} == {
        "layers.gradient"
    }
    csv2tb(tmp_path / "run", tmp_path / "all", fail, raw_tags=-1)
    assert "gradient.norm/layers.7.weight" in reader(tmp_path / "all" / "rank0").Tags()["scalars"]
