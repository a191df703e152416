"""Makes a map's drawing a picture of a fixed size, for TensorBoard.

A card of TensorBoard shows a picture some 375 pixels wide, so it is laid out as on a telephone, at twice the size.
"""

import io
from functools import cache
from typing import Any, Final

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from trainsentry.exporters.maps.colours import NOT_FINITE_COLOUR, NOT_KNOWN_COLOUR, palette
from trainsentry.exporters.maps.layers_map import NEUTRAL, LayersMap
from trainsentry.exporters.maps.map_drawing import RIGHT, TEXT, Drawing, Levels, Stroke, Text, map_drawing

WIDTH: Final = 480
"""Pixels of a picture before it is enlarged."""

SCALE: Final = 2

_INKS: Final = {"ink": (40, 40, 46), "dim": (92, 92, 102), "mark": (0, 110, 160), "suspect": (178, 24, 43)}
_MARGIN: Final = 4
_ANCHORS: Final = {"start": "lm", "middle": "mm", "end": "rm"}


class Paper:
    """A picture in the making: turns places of a drawing into pixels."""

    def __init__(self, drawing: Drawing) -> None:
        self.drawing = drawing
        self.left = (drawing.left + _MARGIN) * SCALE
        self.width = (WIDTH - 2 * _MARGIN - drawing.left - RIGHT) * SCALE
        self.image = Image.new("RGB", (WIDTH * SCALE, (drawing.height + 2 * _MARGIN) * SCALE), (255, 255, 255))
        self.pen = ImageDraw.Draw(self.image)
        self.font: Any = ImageFont.load_default((TEXT + 1) * SCALE)

    def x(self, share: float, beside: float) -> float:
        """Return the pixel of a place."""
        return self.left + share * self.width + beside * SCALE

    def y(self, y: float) -> float:
        """Return the pixel of a height."""
        return (y + _MARGIN) * SCALE

    def draw(self, shape: Text | Stroke | Levels) -> None:
        """Draw a shape."""
        if isinstance(shape, Text):
            place = (self.x(shape.share, shape.beside), self.y(shape.y))
            self.pen.text(place, shape.text, fill=_INKS[shape.ink], font=self.font, anchor=_ANCHORS[shape.anchor])
        elif isinstance(shape, Stroke):
            begin = (self.x(shape.share, shape.beside), self.y(shape.top))
            end = (self.x(shape.share, shape.end), self.y(shape.bottom))
            self.pen.line([begin, end], fill=_INKS[shape.ink], width=round(shape.width * SCALE))
        else:
            width = self.width if shape.width is None else round(shape.width * SCALE)
            size = (width, round(shape.height * SCALE))
            if shape.levels.size and min(size) > 0:
                cells = Image.fromarray(palette()[shape.levels]).resize(size, Image.Resampling.NEAREST)
                self.image.paste(cells, (round(self.x(0, shape.beside)), round(self.y(shape.top))))


def map_png(shown: LayersMap) -> tuple[bytes, int, int]:
    """Return a PNG of a map, its width and its height in pixels."""
    paper = Paper(map_drawing(shown))
    for shape in paper.drawing.shapes:
        paper.draw(shape)
    out = io.BytesIO()
    paper.image.quantize(palette=_few_colours(), dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
    return out.getvalue(), paper.image.width, paper.image.height


@cache
def _few_colours() -> Image.Image:
    """Return the 256 colours of a file, which is then a third as large: every second shade, and inks on white."""
    shades = [(255,) * 3, *palette()[: 2 * NEUTRAL + 1 : 2].tolist(), NOT_FINITE_COLOUR[False], NOT_KNOWN_COLOUR[False]]
    per_ink = (256 - len(shades)) // len(_INKS)
    for ink in _INKS.values():
        shades += np.linspace(ink, (244, 244, 244), per_ink).astype(int).tolist()
    made = Image.new("P", (1, 1))
    made.putpalette([part for shade in shades for part in shade])
    return made
