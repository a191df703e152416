"""Makes a map's drawing a figure of a page: SVG as wide as its place, in the page's colours, light and dark.

The page brings `web/map.css` and `web/map.js`: the first has the inks, the second shows a part of the steps, reads the
cell below the pointer and zooms. A text stands in SVG as text only, so no name becomes markup.
"""

import base64
import io
import json
from functools import cache
from html import escape
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from PIL import Image

from trainsentry.exporters.maps.colours import palette
from trainsentry.exporters.maps.layers_map import LayersMap
from trainsentry.exporters.maps.map_drawing import Drawing, Levels, Stroke, Text, map_drawing
from trainsentry.exporters.short_text import plain

_WEB: Final = Path(__file__).parent / "web"


def map_svg(shown: LayersMap, title: str) -> str:
    """Return a map as an SVG element; `title` is what it says to those who cannot see it.

    The classes of its shapes are their inks: `ink`, `dim`, `mark` and `suspect`, see `web/map.css`. Its data attributes
    have what `web/map.js` reads.
    """
    drawing = map_drawing(shown)
    data = {
        "left": drawing.left,
        "wide-left": drawing.wide_left,
        "top": drawing.top,
        "first": shown.first_step,
        "last": shown.last_step,
        "width": shown.steps_a_column,
        "limit": shown.limit,
        "unit": shown.unit,
        "rows": json.dumps(list(zip(shown.names, shown.pixels, strict=True))),
        "levels": base64.b64encode(shown.levels.tobytes()).decode(),
    }
    attributes = "".join(f' data-{name}="{_safe(str(value))}"' for name, value in data.items())
    inner = "".join(_shape(shape, drawing) for shape in drawing.shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="map-svg" width="100%" height="{drawing.height}" role="img" '
        f'aria-label="{_safe(title)}"{attributes}>{inner}</svg>'
    )


@cache
def map_style() -> str:
    """Return the style that a page with maps needs; it uses the page's `--ink`, `--dim`, `--bad` and `--mark`."""
    return (_WEB / "map.css").read_text(encoding="utf-8")


@cache
def map_script() -> str:
    """Return the script that a page with maps needs."""
    return (_WEB / "map.js").read_text(encoding="utf-8")


def _shape(shape: Text | Stroke | Levels, drawing: Drawing) -> str:
    if isinstance(shape, Levels):
        return _levels(shape, drawing)
    step = "" if shape.step is None else f' data-step="{shape.step}"'
    x = f"{100 * shape.share:.3f}%" if shape.share else "0"
    if isinstance(shape, Text):
        texts = (
            {"": shape.text} if shape.longer in {None, shape.text} else {" narrow": shape.text, " wide": shape.longer}
        )
        return "".join(
            f'<text x="{x}" dx="{shape.beside:g}" y="{shape.y:g}" text-anchor="{shape.anchor}" '
            f'class="{shape.ink}{room}"{step}>{_safe(str(text))}</text>'
            for room, text in texts.items()
        )
    at = (x, x) if shape.beside == shape.end else (f"{shape.beside:g}", f"{shape.end:g}")
    return (
        f'<line x1="{at[0]}" x2="{at[1]}" y1="{shape.top:g}" y2="{shape.bottom:g}" class="{shape.ink}" '
        f'stroke-width="{shape.width:g}"{step}/>'
    )


def _levels(shape: Levels, drawing: Drawing) -> str:
    """Return an image for light and one for dark pages; `web/map.css` shows one of them."""
    width = "100%" if shape.width is None else f"{shape.width:g}"
    x, y = ("0", "0") if shape.width is None else (f"{shape.beside:g}", f"{shape.top:g}")
    images = "".join(
        f'<image class="{name}" x="{x}" y="{y}" width="{width}" height="{shape.height:g}" preserveAspectRatio="none" '
        f'href="{_png(shape.levels, dark=name == "dark")}"/>'
        for name in ("light", "dark")
    )
    if shape.width is not None:
        return images
    return f'<svg class="cells" y="{drawing.top}" width="100%" height="{shape.height:g}">{images}</svg>'


def _png(levels: npt.NDArray[np.uint8], *, dark: bool) -> str:
    """Return levels as the address of a PNG; empty ones as one pixel that has no usual."""
    image = Image.fromarray(levels if levels.size else np.full((1, 1), 254, np.uint8), "L")
    image = image.copy()
    image.putpalette(palette(dark=dark).ravel().tolist())
    out = io.BytesIO()
    image.save(out, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


def _safe(text: str) -> str:
    """Return a text as XML can hold it."""
    return escape(plain(text).replace("\ufffe", "\ufffd").replace("\uffff", "\ufffd"), quote=True)
