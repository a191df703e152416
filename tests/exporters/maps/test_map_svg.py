"""The drawing of a map as SVG: well formed whatever the names, and with the same texts as the picture."""

import json
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from trainsentry.exporters.maps.layer_matrix import LayerMatrix
from trainsentry.exporters.maps.layers_map import Mark, layers_map
from trainsentry.exporters.maps.map_drawing import RIGHT, Text, map_drawing
from trainsentry.exporters.maps.map_svg import map_script, map_style, map_svg
from trainsentry.exporters.maps.ranks_map import chosen_ranks, from_others, ranks_map

SVG = "{http://www.w3.org/2000/svg}"


def small_map(names, steps=20, marks=()):
    matrix = LayerMatrix()
    rows = matrix.rows_of(names)
    for step in range(steps):
        matrix.take(step, rows, np.full(len(names), 1.0 if step != 12 else 90.0))
    return layers_map(matrix, {names[0]: "#1"}, marks)


@pytest.mark.parametrize(
    "name", ["<script>alert(1)</script>", "a\x01b\ufffe", "\ud800", '"><image href="x"/>', "层.权重"]
)
def test_it_is_well_formed_whatever_the_names(name):
    shown = small_map([name, "other"])
    root = ET.fromstring(map_svg(shown, name))
    assert json.loads(root.attrib["data-rows"])[0][0] == name
    assert {e.tag.removeprefix(SVG) for e in root.iter()} == {"svg", "image", "text", "line"}
    assert all(e.attrib["href"].startswith("data:image/png;base64,") for e in root.iter(f"{SVG}image"))


def test_it_has_every_text_of_the_drawing_and_both_palettes():
    shown = small_map([f"model.layers.{i}.self_attn.q_proj.weight" for i in range(4)], marks=[Mark(12, "#1 step 12")])
    root = ET.fromstring(map_svg(shown, "a map"))
    texts = [e.text for e in root.iter(f"{SVG}text")]
    drawn = [shape for shape in map_drawing(shown).shapes if isinstance(shape, Text)]
    assert set(texts) == {shape.text for shape in drawn} | {shape.longer for shape in drawn if shape.longer}
    assert "model.layers.0.self_attn.q_proj.weight #1" in texts  # on a wide page
    assert "0.self_attn.q_proj.weight #1" in texts  # the number and the end on a narrow one
    images = [e.attrib for e in root.iter(f"{SVG}image")]
    assert len({image["href"] for image in images if image["class"] == "dark"}) == len(images) / 2
    assert f"left + {RIGHT}" in map_script()
    assert ".map-svg .dark" in map_style()


def test_a_map_of_nothing_is_a_drawing_too():
    assert ET.fromstring(map_svg(layers_map(LayerMatrix()), "nothing")) is not None
    assert ET.fromstring(map_svg(ranks_map({}, ()), "nothing")) is not None


def test_a_rank_beside_the_others_shows_and_one_that_is_not_finite_too():
    steps = list(range(40))
    rng = np.random.default_rng(0)
    values = 2.0 + 0.01 * rng.standard_normal((4, 40))
    values[2, 20:] += 1.0
    values[3, 30] = np.nan
    shown = ranks_map({rank: (steps, values[rank].tolist()) for rank in range(4)}, [{"id": 7, "rank": 2}])
    assert shown.names == ("rank 0", "rank 1", "rank 2", "rank 3")
    assert shown.suspects == {2: "#7"}
    assert (shown.levels[2, 20:] > 200).all()
    assert (np.abs(shown.levels[[0, 1]].astype(int) - 125) < 60).all()
    assert shown.levels[3, 30] == 255
    assert len(chosen_ranks(range(1000), [17])) <= 64
    assert (from_others(values[:1].astype(np.float32)) == 0).all()
