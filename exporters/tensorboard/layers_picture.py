"""Draws the map of layers by steps as a picture: names left, colour bar right, incidents above and below the data."""

import io
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from trainsentry.exporters.short_text import shorten
from trainsentry.exporters.tensorboard.layers_map import (
    GREY,
    MAGENTA,
    NEUTRAL,
    LayersMap,
    bar_texts,
    named_rows,
    palette,
)

CELL: Final = 4
"""Pixels of a column at least."""

WIDEST: Final = 720
"""Pixels of all columns together at most."""

TEXT: Final = 13
LANE: Final = 16
"""Height of a text, and of a line of labels above the data."""

_LANES: Final = 3
_TITLE: Final = 42
_AXIS: Final = 40
_BAR: Final = 150
_NAMES: Final = 270
_INK: Final = (40, 40, 46)
_DIM: Final = (105, 105, 114)
_MARK: Final = (0, 120, 170)
_SUSPECT: Final = (178, 24, 43)


class _Frame:
    """Places of a picture in pixels: the data's left upper corner, its columns and rows."""

    def __init__(self, shown: LayersMap) -> None:
        self.font: Any = ImageFont.load_default(TEXT)
        rows, columns = (int(n) for n in shown.levels.shape)
        self.cell = max(CELL, min(16, WIDEST // max(columns, 1)))
        self.lanes = _lanes(shown, self)
        longest = max((self.font.getlength(_label(shown, row)) for row in range(rows)), default=0.0)
        self.left = int(min(longest, _NAMES)) + 22
        self.top = _TITLE + LANE * (max(self.lanes, default=-1) + 1) + 8
        self.width, self.height = columns * self.cell, sum(shown.pixels)
        self.tops = np.concatenate([[0], np.cumsum(shown.pixels)]) + self.top

    def x(self, column: int) -> int:
        """Return the middle of a column."""
        return self.left + column * self.cell + self.cell // 2


def picture(shown: LayersMap, title: str) -> tuple[bytes, int, int]:
    """Return a PNG of a map, its width and its height in pixels."""
    frame = _Frame(shown)
    size = (max(frame.left + frame.width, 560) + _BAR, frame.top + max(frame.height, 190) + _AXIS)
    image = Image.new("RGB", size, (255, 255, 255))
    draw = ImageDraw.Draw(image)
    image.paste(_cells(shown, frame), (frame.left, frame.top))
    draw.rectangle(
        (frame.left - 1, frame.top - 1, frame.left + frame.width, frame.top + frame.height), outline=(190, 190, 196)
    )
    draw.text((8, 4), title, fill=_INK, font=ImageFont.load_default(TEXT + 2))
    draw.text((8, 23), "each layer against its own usual; red: suspects of an incident", fill=_DIM, font=frame.font)
    _draw_names(draw, shown, frame)
    _draw_steps(draw, shown, frame)
    _draw_marks(draw, shown, frame)
    _draw_bar(draw, image, shown, (frame.left + frame.width + 24, frame.top + 4))
    out = io.BytesIO()
    image.quantize(palette=_few_colours(), dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
    return out.getvalue(), image.width, image.height


@cache
def _few_colours() -> Image.Image:
    """Return the 256 colours of a file, which is then a third as large: every second shade, and inks on white."""
    shades = [*palette()[: 2 * NEUTRAL + 1 : 2].tolist(), list(MAGENTA), list(GREY), [255, 255, 255]]
    per_ink = (256 - len(shades)) // 4
    for ink in (_INK, _DIM, _MARK, _SUSPECT):
        shades += np.linspace(ink, (255, 255, 255), per_ink, endpoint=False).astype(int).tolist()
    made = Image.new("P", (1, 1))
    made.putpalette([part for shade in shades for part in shade])
    return made


def _cells(shown: LayersMap, frame: _Frame) -> Image.Image:
    rgb = palette()[shown.levels]
    rgb = np.repeat(np.repeat(rgb, np.asarray(shown.pixels, np.intp), axis=0), frame.cell, axis=1)
    return Image.fromarray(rgb)


def _label(shown: LayersMap, row: int) -> str:
    name = shorten(shown.names[row], 34)
    return f"{name} {shown.suspects[row]}" if row in shown.suspects else name


def _draw_names(draw: ImageDraw.ImageDraw, shown: LayersMap, frame: _Frame) -> None:
    for row in named_rows(shown, TEXT + 1):
        middle = (frame.tops[row] + frame.tops[row + 1]) / 2
        ink = _SUSPECT if row in shown.suspects else _INK
        draw.text((frame.left - 14, middle), _label(shown, row), fill=ink, font=frame.font, anchor="rm")
        if row in shown.suspects:
            x = frame.left - 3
            draw.polygon([(x - 8, middle - 5), (x - 8, middle + 5), (x, middle)], fill=_SUSPECT)
        else:
            draw.line([(frame.left - 8, middle), (frame.left - 3, middle)], fill=_DIM)


def _draw_steps(draw: ImageDraw.ImageDraw, shown: LayersMap, frame: _Frame) -> None:
    bottom = frame.top + frame.height
    for step in _round_steps(shown, max(1, frame.width // 80)):
        x = frame.x(shown.column_of(step))
        draw.line([(x, bottom), (x, bottom + 4)], fill=_DIM)
        draw.text((x, bottom + 6), str(step), fill=_INK, font=frame.font, anchor="ma")
    draw.text((frame.left + frame.width // 2, bottom + 22), "step", fill=_DIM, font=frame.font, anchor="ma")


def _round_steps(shown: LayersMap, most: int) -> range:
    """Return at most about `most` steps of a map at a round distance: 1, 2 or 5 times a power of ten."""
    wanted = max(1.0, (shown.last_step - shown.first_step) / most)
    power = 10 ** int(np.log10(wanted))
    distance = next(n * power for n in (1, 2, 5, 10) if n * power >= wanted)
    return range(-(-shown.first_step // distance) * distance, shown.last_step, distance)


def _draw_marks(draw: ImageDraw.ImageDraw, shown: LayersMap, frame: _Frame) -> None:
    """Draw each incident as a line from its label down to the data, and a tick below; nothing covers the data."""
    bottom = frame.top + frame.height
    for mark, lane in zip(_inside(shown), frame.lanes, strict=True):
        x = frame.x(shown.column_of(mark.step))
        if lane < _LANES:
            y = _TITLE + LANE * lane + LANE // 2
            draw.line([(x, y - 6), (x, frame.top - 2)], fill=_MARK, width=2)
            right = x + 5 + frame.font.getlength(mark.label) < frame.left + frame.width + _BAR
            draw.text(
                (x + 5 if right else x - 5, y), mark.label, fill=_MARK, font=frame.font, anchor="lm" if right else "rm"
            )
        draw.line([(x, frame.top - 6), (x, frame.top - 2)], fill=_MARK, width=2)
        draw.line([(x, bottom + 1), (x, bottom + 5)], fill=_MARK, width=2)


def _inside(shown: LayersMap) -> list[Any]:
    return [mark for mark in shown.marks if 0 <= shown.column_of(mark.step) < shown.levels.shape[1]]


def _lanes(shown: LayersMap, frame: _Frame) -> list[int]:
    """Return the line of each incident's label: the first in which no other label is in its way."""
    taken: list[tuple[int, float, float]] = []
    lanes = []
    for mark in _inside(shown):
        x = shown.column_of(mark.step) * frame.cell
        end = x + frame.font.getlength(mark.label) + 14
        lane = next(n for n in _counted() if all(n != m or end < low or x > high for m, low, high in taken))
        taken.append((lane, x - 4, end))
        lanes.append(min(lane, _LANES))
    return lanes


def _counted() -> Iterator[int]:
    yield from range(10_000)


def _draw_bar(draw: ImageDraw.ImageDraw, image: Image.Image, shown: LayersMap, corner: tuple[int, int]) -> None:
    """Draw the colour bar with its numbers, and what the two other colours mean."""
    x, y = corner
    height = 120
    levels = np.linspace(2 * NEUTRAL, 0, height).astype(int)
    image.paste(Image.fromarray(np.repeat(palette()[levels][:, None], 16, axis=1)), (x, y))
    font: Any = ImageFont.load_default(TEXT)
    for share, text in bar_texts(shown.limit):
        at = y + (1 - share) / 2 * (height - 1)
        draw.line([(x + 16, at), (x + 20, at)], fill=_DIM)
        draw.text((x + 24, at), text, fill=_INK, font=font, anchor="lm")
    for i, (colour, text) in enumerate(((MAGENTA, "not finite"), (GREY, "not known yet"))):
        at = y + height + 12 + 20 * i
        draw.rectangle((x, at, x + 15, at + 13), fill=colour)
        draw.text((x + 24, at + 7), text, fill=_INK, font=font, anchor="lm")
    draw.text((x, y + height + 52), "robust deviations", fill=_DIM, font=font)
