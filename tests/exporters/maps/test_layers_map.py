"""The map shows the culprit: two faults 700 steps apart stand out in the pixels, and nothing is drawn over the data."""

import io

import numpy as np
import pytest
from PIL import Image

from trainsentry.exporters.maps.colours import NOT_FINITE_COLOUR, palette
from trainsentry.exporters.maps.deviation import deviations
from trainsentry.exporters.maps.layer_matrix import LayerMatrix
from trainsentry.exporters.maps.layers_map import CARD, NEUTRAL, Mark, layers_map
from trainsentry.exporters.maps.map_drawing import NARROW, RIGHT, map_drawing, share_of
from trainsentry.exporters.maps.map_png import Paper, map_png
from trainsentry.exporters.maps.modules_map import modules_map

FIRST, SECOND = "h.2.mlp.weight", "h.7.attn.weight"
SUSPECTS = {FIRST: "#1", SECOND: "#2"}
MARKS = (Mark(700, "#1 step 700"), Mark(1400, "#2 step 1400"))


def long_run(factors, *, layers=12, steps=2000, noise=0.2):
    """Return the matrix of a run whose layers differ by orders of magnitude; `factors` are {(step, name): factor}."""
    rng = np.random.default_rng(0)
    names = [f"h.{i}.{part}.weight" for i in range(layers) for part in ("ln", "attn", "mlp")]
    matrix = LayerMatrix()
    rows = matrix.rows_of(names)
    usual = 10.0 ** rng.uniform(-8, 1, len(names))
    for step in range(steps):
        sizes = usual * np.exp(-step / 900 + rng.normal(0, noise, len(names)))
        for (at, name), factor in factors.items():
            if at == step:
                sizes[names.index(name)] *= factor
        matrix.take(step, rows, sizes)
    return matrix


def pixels(shown):
    png, width, height = map_png(shown)
    image = np.asarray(Image.open(io.BytesIO(png)).convert("RGB"), int)
    assert image.shape == (height, width, 3)
    return image


def cell(image, shown, row, column):
    """Return the pixels of one cell, less its edges."""
    paper, wide = Paper(map_drawing(shown)), shown.levels.shape[1]
    top = round(paper.y(paper.drawing.top)) + sum(shown.pixels[:row])
    left, right = (paper.left + paper.width * edge / wide for edge in (column, column + 1))
    return image[top : top + shown.pixels[row], int(np.ceil(left)) : max(int(right), int(np.ceil(left)) + 1)]


def from_neutral(part):
    """Return how far pixels are from the colour of what is usual, 0 to 441."""
    return np.linalg.norm(part - palette()[NEUTRAL].astype(int), axis=-1)


def test_two_faults_700_steps_apart_both_stand_out_in_the_pixels():
    shown = layers_map(long_run({(700, FIRST): 200.0, (1400, SECOND): 1024.0}), SUSPECTS, MARKS)
    image = pixels(shown)
    for step, name in ((700, FIRST), (1400, SECOND)):
        row, column = shown.row_of(name), shown.column_of(step)
        fault = cell(image, shown, row, column)
        assert from_neutral(fault).min() > 200
        assert fault.shape[0] >= 15
        assert fault.shape[1] >= 2
        for other in ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)):
            assert from_neutral(cell(image, shown, *other)).max() < 180  # noise is up to half of the scale


def test_the_second_fault_of_a_layer_shows_beside_the_first_and_much_greater_one():
    shown = layers_map(long_run({(700, FIRST): 1e6, (1400, FIRST): 8.0}), {FIRST: "#1"}, MARKS)
    image = pixels(shown)
    assert from_neutral(cell(image, shown, shown.row_of(FIRST), shown.column_of(1400))).min() > 200


def test_marks_and_labels_cover_no_cell():
    matrix = long_run({(700, FIRST): 200.0})
    plain, marked = layers_map(matrix, SUSPECTS), layers_map(matrix, SUSPECTS, MARKS)
    data = []
    for shown in (plain, marked):
        paper = Paper(map_drawing(shown))
        top = round(paper.y(paper.drawing.top))
        data.append(pixels(shown)[top : top + sum(shown.pixels), paper.left : paper.left + paper.width])
    np.testing.assert_array_equal(*data)
    expected = palette()[marked.levels[:, marked.column_of(1400)]].astype(int)
    middles = np.cumsum(marked.pixels) - np.asarray(marked.pixels) / 2
    column = round((marked.column_of(1400) + 0.5) / marked.levels.shape[1] * data[0].shape[1])
    assert np.abs(data[0][middles.astype(int), column] - expected).max() <= 12  # a file has every second shade


def test_an_incident_has_its_line_over_its_column():
    marked = layers_map(long_run({(700, FIRST): 200.0}), SUSPECTS, MARKS[:1])
    paper = Paper(map_drawing(marked))
    above = pixels(marked)[round(paper.y(paper.drawing.top)) - 3]
    blue = np.flatnonzero((above[:, 2] > 140) & (above[:, 0] < 60))
    assert abs(blue.mean() - paper.x(share_of(marked, 700), 0)) <= 1.5


@pytest.mark.parametrize("steps", [(700, 1400), (100, 110, 120), (1900, 1950, 1999), (0, 1999), (3, 900, 905, 1990)])
def test_labels_of_incidents_stand_beside_each_other_on_a_telephone(steps):
    marks = [Mark(step, f"#{n} step {step}") for n, step in enumerate(steps, 1)]
    shown = layers_map(long_run({}, steps=2000, layers=2), {}, marks)
    drawing = map_drawing(shown)
    texts = [s for s in drawing.shapes if getattr(s, "ink", "") == "mark" and hasattr(s, "text")]
    assert {text.text for text in texts} == {mark.label for mark in marks}
    places = []
    for text in texts:
        at = text.share * NARROW + text.beside
        ends = (at, at + 6 * len(text.text)) if text.anchor == "start" else (at - 6 * len(text.text), at)
        assert -drawing.left <= ends[0] < ends[1] <= NARROW + RIGHT
        assert text.y < drawing.top
        places.append((text.y, *ends))
    for n, (y, low, high) in enumerate(places):
        assert all(y != other or high < left or low > right for other, left, right in places[:n])


def test_more_layers_than_rows_share_rows_but_a_suspect_does_not():
    shown = layers_map(long_run({(700, FIRST): 200.0}, layers=120, steps=800), SUSPECTS, MARKS)
    assert len(shown.names) < 190
    assert shown.pixels[shown.row_of(FIRST)] >= 15
    assert [shown.names[row] for row in shown.suspects] == [FIRST, SECOND]
    assert shown.levels[shown.row_of(FIRST), shown.column_of(700)] == 2 * NEUTRAL
    assert sum(1 + int(name.split(" and ")[1].split()[0]) if " and " in name else 1 for name in shown.names) == 360


def test_rounding_noise_of_a_weight_that_hardly_moves_stays_pale():
    matrix = LayerMatrix()
    rows = matrix.rows_of(["ln.weight", "mlp.weight"])
    rng = np.random.default_rng(1)
    for step in range(300):
        matrix.take(step, rows, np.asarray([1 + 1e-7 * rng.normal(), 3e-3 * np.exp(rng.normal(0, 0.2))]))
    shown = layers_map(matrix)
    known = shown.levels[0][shown.levels[0] <= 2 * NEUTRAL].astype(int)
    assert np.abs(known - NEUTRAL).max() <= 1


def test_a_trend_that_all_layers_share_is_usual_and_one_layers_jump_is_not():
    steps = np.arange(200)
    rng = np.random.default_rng(0)
    table = 10.0 ** (-steps / 60) * np.exp(0.05 * rng.standard_normal((30, 200)))
    table[7, 120:140] *= 50
    away = deviations(table.astype(np.float32))
    calm = np.delete(away, 7, axis=0)[:, 5:]
    assert np.abs(np.median(calm[:, 35:], axis=0)).max() < 1.5
    assert away[7, 120] > 10
    assert np.percentile(np.abs(calm), 99) < 6


def test_a_steady_beginning_is_no_deviation_and_a_value_that_is_not_finite_is_magenta():
    sizes = np.exp(-np.arange(100) / 10.0)[None].astype(np.float32)  # falls by ten per cent a step
    sizes[0, 60] = np.inf
    away = deviations(sizes)[0]
    assert np.isnan(away[:5]).all()
    assert np.isinf(away[60])
    assert np.abs(away[20:60]).max() < 4
    matrix = LayerMatrix()
    row = matrix.rows_of(["a"])
    for step, size in enumerate(sizes[0]):
        matrix.take(step, row, np.asarray([size]))
    shown = layers_map(matrix)
    assert np.abs(cell(pixels(shown), shown, 0, 60) - np.asarray(NOT_FINITE_COLOUR[False])).max() <= 2


@pytest.mark.parametrize("steps", [0, 1, 6])
def test_a_run_of_few_steps_has_a_map(steps):
    matrix = LayerMatrix()
    rows = matrix.rows_of(["a", "b"])
    for step in range(steps):
        matrix.take(step, rows, np.asarray([1.0, 0.0]))
    assert pixels(layers_map(matrix, {"a": "#1"}, [Mark(0, "#1 step 0")])).size


def test_a_quantity_sampled_every_tenth_step_has_no_holes():
    matrix = LayerMatrix()
    rows = matrix.rows_of(["a"])
    rng = np.random.default_rng(2)
    for step in range(0, 1000, 10):
        matrix.take(step, rows, np.exp(rng.normal(0, 0.1, 1)) * (100 if step == 600 else 1))
    shown = layers_map(matrix)
    assert 230 < shown.levels[0, shown.column_of(609)] <= 2 * NEUTRAL
    assert (shown.levels[0, 25:] <= 2 * NEUTRAL).all()


def test_the_first_map_has_the_faults_of_all_quantities_in_their_modules_rows():
    gradients, weights = long_run({(700, "h.2.mlp.weight"): 200.0}), long_run({(1400, "h.7.attn.weight"): 1024.0})
    suspects = [{"name": "h.2.mlp.weight", "quantity": "gradient"}]
    incident = {"id": 3, "first_seen": 700, "score": 9.0, "severity": "warning", "suspects": suspects}
    shown = modules_map({"gradient": gradients, "parameter": weights}, [incident])
    assert len(shown.names) == 36
    assert shown.suspects == {shown.row_of("h.2.mlp"): "#3"}
    image = pixels(shown)
    for step, module in ((700, "h.2.mlp"), (1400, "h.7.attn")):
        row, column = shown.row_of(module), shown.column_of(step)
        assert from_neutral(cell(image, shown, row, column)).min() > 200
        for other in ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)):
            assert from_neutral(cell(image, shown, *other)).max() < 180  # noise is up to half of the scale


def test_the_map_of_a_card_is_no_larger_than_the_card_and_names_every_suspect():
    matrices = {"gradient": long_run({(700, FIRST): 200.0}, layers=40, steps=800)}
    suspects = [{"name": name, "quantity": "gradient"} for name in (FIRST, SECOND)]
    incidents = [{"id": n, "first_seen": 300 * n, "suspects": [s]} for n, s in enumerate(suspects, 1)]
    shown = modules_map(matrices, incidents, CARD)
    _, width, height = map_png(shown, card=True)
    assert width == 367
    assert height <= 215
    texts = {getattr(shape, "text", "") for shape in map_drawing(shown, card=True).shapes}
    assert {"h.2.mlp #1", "h.7.attn #2", "#1 step 300", "#2 step 600"} <= texts
