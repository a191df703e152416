"""Makes a map's drawing a picture of a fixed size, for TensorBoard.

A card of TensorBoard's first page shows a picture in some 367 by 215 pixels, and one that is larger with every second
or third pixel left out. So the map on that page has the size of a card; others are large, to be looked at alone.
"""

import io
from functools import cache
from typing import Any, Final

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from trainsentry.exporters.maps.colours import NOT_FINITE_COLOUR, NOT_KNOWN_COLOUR, palette
from trainsentry.exporters.maps.layers_map import NEUTRAL, LayersMap
from trainsentry.exporters.maps.map_drawing import RIGHT, Drawing, Levels, Stroke, Text, map_drawing

WIDTH: Final = 960
CARD_WIDTH: Final = 367
"""Pixels of a picture."""

LETTERS: Final = 12
"""Pixels of a text."""

_INKS: Final = {"ink": (40, 40, 46), "dim": (92, 92, 102), "mark": (0, 110, 160), "suspect": (178, 24, 43)}
_MARGIN: Final = 4
_ANCHORS: Final = {"start": "lm", "middle": "mm", "end": "rm"}


class Paper:
    """A picture in the making: turns places of a drawing into pixels."""

    def __init__(self, drawing: Drawing, *, card: bool = False) -> None:
        width = CARD_WIDTH if card else WIDTH
        self.drawing = drawing
        self.left = drawing.wide_left + _MARGIN
        self.width = width - _MARGIN - self.left - RIGHT
        self.image = Image.new("RGB", (width, drawing.height + 2 * _MARGIN), (255, 255, 255))
        self.pen = ImageDraw.Draw(self.image)
        self.font: Any = ImageFont.load_default(LETTERS)

    def x(self, share: float, beside: float) -> float:
        """Return the pixel of a place."""
        return self.left + share * self.width + beside

    def y(self, y: float) -> float:
        """Return the pixel of a height."""
        return y + _MARGIN

    def draw(self, shape: Text | Stroke | Levels) -> None:
        """Draw a shape."""
        if isinstance(shape, Text):
            place = (self.x(shape.share, shape.beside), self.y(shape.y))
            text = shape.text if shape.longer is None else shape.longer
            self.pen.text(place, text, fill=_INKS[shape.ink], font=self.font, anchor=_ANCHORS[shape.anchor])
        elif isinstance(shape, Stroke):
            begin = (self.x(shape.share, shape.beside), self.y(shape.top))
            end = (self.x(shape.share, shape.end), self.y(shape.bottom))
            self.pen.line([begin, end], fill=_INKS[shape.ink], width=round(shape.width))
        else:
            width = self.width if shape.width is None else round(shape.width)
            size = (width, round(shape.height))
            if shape.levels.size and min(size) > 0:
                cells = Image.fromarray(palette()[shape.levels]).resize(size, Image.Resampling.NEAREST)
                self.image.paste(cells, (round(self.x(0, shape.beside)), round(self.y(shape.top))))


def map_png(shown: LayersMap, *, card: bool = False) -> tuple[bytes, int, int]:
    """Return a PNG of a map, large or of the size of a `card`, its width and its height in pixels."""
    paper = Paper(map_drawing(shown, card=card), card=card)
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
