"""Ten thousand series need ten cards: numbers over all layers, pictures, incidents, and few tags."""

import io
import math
import threading
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from step_records import Records
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugin_util import markdown_to_safe_html
from tensorboard.plugins.custom_scalar import layout_pb2
from written_files import fail

from trainsentry.anomaly.incident import Incident, Suspect
from trainsentry.collectors.statistics import STATISTICS
from trainsentry.exporters.convert.csv2tb import csv2tb
from trainsentry.exporters.csv.writer import CsvWriter
from trainsentry.exporters.maps.layer_matrix import LayerMatrix
from trainsentry.exporters.maps.layers_map import NOT_FINITE, layers_map
from trainsentry.exporters.tensorboard import painter
from trainsentry.exporters.tensorboard.writer import TensorBoardWriter


def reader(directory):
    made = EventAccumulator(str(directory), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
    made.Reload()
    return made


def text_of(found, tag):
    return found.Tensors(tag)[-1].tensor_proto.string_val[0].decode()


def incident_at(step, name, number=1, severity="warning", **changes):
    suspect = Suspect(step, 0, name, "gradient", "max", "spike", 60.0, "", "it is *ten* times its usual")
    made = Incident(
        number, step, 0, name, "gradient", "max", "spike", severity, 60.0, f"the gradient of {name} jumped", (suspect,),
        ("dump: dump/step3/rank0 (4 tensors)",), step, step,
    )  # fmt: skip
    return replace(made, **changes)


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
    assert values("not_finite") == [1.0]  # while it is 0 it is no card


def test_above_the_limit_stay_scalars_norms_and_as_many_others_as_fit_and_the_rest_is_told(tmp_path):
    records = Records()
    writer = TensorBoardWriter(tmp_path, records.table, STATISTICS, max_raw_tags=15, renew_every=1)
    for n in range(3):
        writer.write(records.step(n, layers(10) | {("loss", "loss"): 1.0}))
    writer.close()
    found = reader(tmp_path)
    tags = found.Tags()["scalars"]
    assert "scalars/loss" in tags
    assert sum(tag.startswith("gradient.norm/") for tag in tags) == 10
    assert sum(tag.startswith("gradient.") for tag in tags) == 15
    assert "layers.gradient/rms_max" in tags
    assert "25 are left out (max of 10, mean of 10, min of 5)" in text_of(found, "run/what is missing here")


def test_the_suspect_has_all_its_curves_however_many_series_there_are(tmp_path):
    records = Records()
    writer = TensorBoardWriter(tmp_path, records.table, STATISTICS, max_raw_tags=5)
    for n in range(4):
        writer.write(records.step(n, layers(10) | {("loss", "loss"): 1.0}))
        if n == 1:
            writer.write_incident(incident_at(1, "layers.9.weight"))
    writer.close()
    found = reader(tmp_path)
    assert [e.step for e in found.Scalars("gradient.max/layers.9.weight")] == [2, 3]
    assert "gradient.max/layers.1.weight" not in found.Tags()["scalars"]


def test_a_count_that_is_always_zero_is_no_card_and_one_that_is_not_has_its_curve(tmp_path):
    records = Records()
    writer = TensorBoardWriter(tmp_path, records.table, STATISTICS)
    for n in range(4):
        writer.write(records.step(n, layers(2, lambda i, n=n: math.nan if (i, n) == (1, 2) else 4.0)))
    writer.close()
    found = reader(tmp_path)
    flat = [tag for tag in found.Tags()["scalars"] if ".nans/" in tag or ".infs/" in tag or ".zeros/" in tag]
    assert flat == ["gradient.nans/layers.1.weight"]
    assert [(e.step, e.value) for e in found.Scalars(flat[0])] == [(2, 1.0), (3, 0.0)]


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
        assert writer.painter.wait(30)
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
    shown = layers_map(matrix)
    assert shown.levels[2, shown.column_of(3210)] == NOT_FINITE
    assert (shown.levels == NOT_FINITE).sum() == 1


def test_a_slow_picture_is_dropped_and_never_the_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(painter, "CLOSE_SECONDS", 0.2)
    records = Records()
    writer = TensorBoardWriter(tmp_path, records.table, STATISTICS, renew_every=2)
    release, slow = threading.Event(), writer.dashboard.drawing

    def drawing():
        draw = slow()
        return lambda: (release.wait(60), draw())[1]

    writer.dashboard.drawing = drawing
    for n in range(10):
        writer.write(records.step(n, layers(2)))
    writer.close()
    release.set()
    found = reader(tmp_path)
    assert [e.step for e in found.Scalars("layers.gradient/rms_max")] == list(range(10))
    assert found.Tags()["images"] == []
    assert "4 sets of pictures left out, the last at step 9: they took longer" in text_of(
        found, "run/what is missing here"
    )


def test_a_picture_that_cannot_be_drawn_costs_that_picture(tmp_path):
    records = Records()
    writer = TensorBoardWriter(tmp_path, records.table, STATISTICS, renew_every=2)
    good, failing = writer.dashboard.drawing, iter([True])
    writer.dashboard.drawing = lambda: (lambda: 1 / 0) if next(failing, False) else good()
    for n in range(6):
        writer.write(records.step(n, layers(2)))
        assert writer.painter.wait(30)
    writer.close()
    found = reader(tmp_path)
    assert [e.step for e in found.Images("heatmaps/gradient")] == [4, 5]
    assert "at step 2: ZeroDivisionError" in text_of(found, "run/what is missing here")


def test_steps_that_never_came_are_told_where_they_are_missed(tmp_path):
    records, gap = Records(), {"sink": "tensorboard", "first_step": 3, "last_step": 7, "reason": "OSError: full"}
    writer = TensorBoardWriter(tmp_path, records.table, STATISTICS, missing=lambda: [gap])
    writer.write(records.step(0, layers(2)))
    writer.close()
    assert "steps 3 to 7 (OSError: full)" in text_of(reader(tmp_path), "run/what is missing here")


def test_an_incident_is_a_dot_on_the_loss_and_on_the_suspects_curve(tmp_path):
    records = Records()
    writer = TensorBoardWriter(tmp_path, records.table, STATISTICS)
    for n in range(12):
        sizes = layers(3, lambda i, n=n: 400.0 if (i, n) == (2, 7) else 4.0)
        writer.write(records.step(n, sizes | {("loss", "loss"): 3.0 - n / 10}))
    writer.write_incident(incident_at(7, "layers.2.weight"))
    writer.write_incident(incident_at(7, "layers.2.weight", last_seen=9))  # it comes again
    writer.close()
    dots = reader(tmp_path / "incident-1")
    assert set(dots.Tags()["scalars"]) == {
        "scalars/loss", "0_overview/loss", "gradient.norm/layers.2.weight", "gradient.max/layers.2.weight",
    }  # fmt: skip
    for tag in dots.Tags()["scalars"]:
        (dot,) = dots.Scalars(tag)
        assert (dot.step, dot.value) == next((e.step, e.value) for e in reader(tmp_path).Scalars(tag) if e.step == 7)


def test_an_incident_that_comes_before_its_record_gets_its_dots_at_its_step(tmp_path):
    records = Records()
    writer = TensorBoardWriter(tmp_path, records.table, STATISTICS)
    for n in range(6):
        if n == 4:
            writer.write_incident(incident_at(4, "layers.2.weight"))
        writer.write(records.step(n, layers(3) | {("loss", "loss"): 3.0 - n / 10}))
    writer.close()
    dots = reader(tmp_path / "incident-1")
    assert {dot.step for tag in dots.Tags()["scalars"] for dot in dots.Scalars(tag)} == {4}
    assert [(e.step, e.value) for e in reader(tmp_path).Scalars("0_overview/incidents")] == [(3, 0.0), (4, 1.0)]


def test_incidents_stand_in_the_order_of_their_numbers_with_the_worst_marked(tmp_path):
    records = Records()
    writer = TensorBoardWriter(tmp_path / "tensorboard" / "rank0", records.table, STATISTICS)
    writer.write(records.step(0, layers(3)))
    for number, severity in ((2, "critical"), (1, "warning"), (3, "warning")):
        writer.write_incident(incident_at(number, f"layers.{number}.weight", number, severity))
    writer.close()
    found = reader(tmp_path / "tensorboard" / "rank0")
    rows = [line for line in text_of(found, "incidents/0 all").splitlines() if line.startswith("| ")]
    assert [row.split("|")[1].strip() for row in rows] == ["incident", "1", "2 **worst**", "3"]
    assert "(the worst)" in text_of(found, "incidents/2")
    assert "(the worst)" not in text_of(found, "incidents/1")


def test_an_incident_is_a_list_and_a_list_with_the_command_that_opens_the_report(tmp_path):
    records = Records()
    writer = TensorBoardWriter(tmp_path / "tensorboard" / "rank0", records.table, STATISTICS)
    writer.write(records.step(3, layers(1)))
    writer.write_incident(incident_at(3, "layers.*.weight"))
    writer.close()
    text = text_of(reader(tmp_path / "tensorboard" / "rank0"), "incidents/1")
    html = markdown_to_safe_html(text)
    assert [html.count(tag) for tag in ("<ol>", "<ul>", "<li>")] == [1, 1, 2]
    assert f"<code>trainsentry report {tmp_path}</code>" in html
    assert "<code>layers.*.weight</code>" in html
    assert "*ten* times" in html


def test_an_incident_arrives_as_text_that_shows_names_as_they_are(tmp_path):
    records = Records()
    writer = TensorBoardWriter(tmp_path, records.table, STATISTICS)
    writer.write(records.step(3, layers(1)))
    incident = incident_at(3, "<script>alert(1)</script>")
    writer.write_incident(incident)
    writer.close()
    found = reader(tmp_path)
    text = text_of(found, "incidents/1")
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


def test_a_conversion_of_very_many_series_shows_them_together_and_each_layers_norm(tmp_path):
    records = Records()
    csv = CsvWriter(tmp_path / "run" / "rank0", records.table, STATISTICS)
    for n in range(3):
        csv.write(records.step(n, layers(20)))
    csv.close()
    done = csv2tb(tmp_path / "run", tmp_path / "out", fail, raw_tags=100)
    assert done.too_many == 1
    tags = reader(tmp_path / "out" / "rank0").Tags()["scalars"]
    assert {tag.partition("/")[0] for tag in tags} == {"layers.gradient", "gradient.norm"}
    assert sum(tag.startswith("gradient.norm/") for tag in tags) == 20
    csv2tb(tmp_path / "run", tmp_path / "none", fail, raw_tags=0)
    assert {tag.partition("/")[0] for tag in reader(tmp_path / "none" / "rank0").Tags()["scalars"]} == {
        "layers.gradient"
    }
    csv2tb(tmp_path / "run", tmp_path / "all", fail, raw_tags=-1)
    assert "gradient.max/layers.7.weight" in reader(tmp_path / "all" / "rank0").Tags()["scalars"]
