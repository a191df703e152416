"""Draws layers over steps: log colour scale, non-finite values in magenta, incidents marked."""

import io
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from trainsentry.exporters.short_text import shorten
from trainsentry.exporters.tensorboard.layer_matrix import LayerMatrix, log_shares

MAX_ROWS: Final = 400
"""Rows of a picture; with more layers, neighbours share a row that shows their maximum."""

STOPS: Final = np.asarray(
    [[10, 12, 40], [45, 30, 110], [110, 35, 120], [175, 55, 95], [225, 100, 60], [245, 170, 60], [250, 235, 160]]
)
"""Dark to light, readable without telling red from green."""

_BAD: Final = (255, 0, 255)
_NOTHING: Final = (225, 225, 228)
_INK: Final = (40, 40, 46)
_MARK: Final = (0, 160, 220)
_LEFT: Final = 190
_TOP: Final = 16
_BOTTOM: Final = 30


def colours(values: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.uint8], float, float]:
    """Return colours, shape (rows, columns, 3), and the values of the darkest and the lightest colour.

    The scale is logarithmic, from the 1st to the 99th percentile of the positive values.
    """
    shares, low, high = log_shares(values)
    share = shares * (len(STOPS) - 1)
    below = np.minimum(share.astype(int), len(STOPS) - 2)
    part = (share - below)[..., None]
    rgb = STOPS[below] * (1 - part) + STOPS[below + 1] * part
    rgb[np.isnan(values)] = _NOTHING
    rgb[np.isinf(values)] = _BAD
    return rgb.astype(np.uint8), low, high


def picture(matrix: LayerMatrix, title: str, incidents: Sequence[int] = ()) -> tuple[bytes, int, int]:
    """Return a PNG of a matrix, its width and its height in pixels; `incidents` are steps to mark."""
    values, names = matrix.shown(MAX_ROWS)
    rgb, low, high = colours(values)
    across = max(1, min(8, 640 // max(values.shape[1], 1)))
    down = max(1, min(14, 420 // max(values.shape[0], 1)))
    grid = Image.fromarray(np.repeat(np.repeat(rgb, down, axis=0), across, axis=1))
    size = (_LEFT + grid.width + 12, _TOP + grid.height + _BOTTOM)
    image = Image.new("RGB", size, (255, 255, 255))
    image.paste(grid, (_LEFT, _TOP))
    draw = ImageDraw.Draw(image)
    draw.text((4, 2), f"{title}   {low:.2g} dark … {high:.2g} light, magenta: not finite", fill=_INK)
    every = max(1, -(-14 // down))
    for row in range(0, len(names), every):
        draw.text((4, _TOP + row * down - 2 + down // 2 - 4), shorten(names[row], 30), fill=_INK)
    for column in range(0, values.shape[1], max(1, 80 // across)):
        draw.text((_LEFT + column * across, _TOP + grid.height + 6), str(matrix.step_of(column)), fill=_INK)
    for step in incidents:
        column = matrix.column_of(step)
        if 0 <= column < values.shape[1]:
            x = _LEFT + column * across + across // 2
            draw.polygon([(x - 4, _TOP - 6), (x + 4, _TOP - 6), (x, _TOP)], fill=_MARK)
            draw.line([(x, _TOP + grid.height), (x, _TOP + grid.height + 5)], fill=_MARK, width=2)
    out = io.BytesIO()
    image.save(out, "PNG", optimize=True)
    return out.getvalue(), image.width, image.height
