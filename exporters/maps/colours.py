"""The colours of a map's levels, on light and on dark pages.

Blue is below usual, red above, and what is usual has nearly the colour of the page: apart for every kind of colour
vision, and with the fault as what stands out most on either page.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from trainsentry.exporters.maps.layers_map import NEUTRAL

_LIGHT: Final = (
    (5, 48, 97), (33, 102, 172), (67, 147, 195), (146, 197, 222), (228, 236, 241), (244, 244, 244),
    (250, 230, 218), (244, 165, 130), (214, 96, 77), (178, 24, 43), (103, 0, 31),
)  # fmt: skip
_DARK: Final = (
    (178, 219, 255), (104, 176, 244), (58, 128, 200), (43, 84, 128), (38, 46, 58), (36, 36, 42),
    (56, 42, 42), (118, 50, 44), (190, 62, 50), (246, 102, 66), (255, 190, 150),
)  # fmt: skip
"""From far below usual to far above."""

NOT_FINITE_COLOUR: Final = {False: (214, 0, 214), True: (255, 84, 255)}
NOT_KNOWN_COLOUR: Final = {False: (214, 214, 219), True: (82, 82, 92)}
"""Colours of what was not finite, and of what was not sampled or has no usual yet, on light and on dark pages."""


def palette(*, dark: bool = False) -> npt.NDArray[np.uint8]:
    """Return the colours of the 256 levels, shape (256, 3)."""
    stops = np.asarray(_DARK if dark else _LIGHT)
    positions = np.linspace(0, len(stops) - 1, 2 * NEUTRAL + 1)
    shades = np.stack([np.interp(positions, np.arange(len(stops)), stops[:, c]) for c in range(3)], axis=1)
    others = np.tile(np.asarray([NOT_KNOWN_COLOUR[dark]]), (256 - len(shades), 1))
    others[-1] = NOT_FINITE_COLOUR[dark]
    return np.concatenate([shades, others]).astype(np.uint8)
