"""The one drawing of a map: names left, incidents above and below the data, steps and a colour bar below.

It is a list of shapes. Their places are a share of the data's width and pixels beside it, so that `map_svg` makes a
figure as wide as its page of them, on a telephone too, and `map_png` a picture of a fixed size.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trainsentry.exporters.maps.layers_map import NEUTRAL, NOT_FINITE, NOT_KNOWN, LayersMap, Mark, named_rows
from trainsentry.exporters.short_text import brief

NARROW: Final = 150
"""Pixels of the data on a telephone of 400 pixels: there the labels of incidents must not cover each other."""

LETTER: Final = 6.6
"""Pixels of a letter at most, in the usual fonts at TEXT pixels, on average."""

TEXT: Final = 11
LONGEST: Final = (29, 46)
"""Letters of a row's label on a narrow and on a wide page: its name, and the numbers of its incidents."""

CARD_LETTER: Final = 6.0
CARD_LONGEST: Final = 26
"""The same in a card, whose letters are those of `map_png`."""

LANE: Final = 15
MOST_LANES: Final = 3
"""Height of a line of labels above the data, and how many there are at most; one less in a card."""

ROUGHLY: Final = 5
"""Steps on the axis: a telephone has no room for more."""

BAR: Final = (210, 10)
CARD_BAR: Final = (80, 8)
"""Width and height of the colour bar."""

RIGHT: Final = 16
"""Pixels right of the data."""


@dataclass(frozen=True)
class Text:
    """A text whose middle has height `y`; `anchor` tells which end is at its place. `ink` see `map_svg`.

    A wide page has room for `longer` in its place.
    """

    share: float
    beside: float
    y: float
    text: str
    anchor: str
    ink: str
    step: int | None = None
    longer: str | None = None


@dataclass(frozen=True)
class Stroke:
    """A line from (`beside`, `top`) to (`end`, `bottom`), both beside the place `share`."""

    share: float
    beside: float
    end: float
    top: float
    bottom: float
    ink: str
    width: float
    step: int | None = None


@dataclass(frozen=True)
class Levels:
    """Levels of colour, shape (height, n): as wide as the data, or `width` pixels from `beside` on."""

    levels: npt.NDArray[np.uint8]
    beside: float
    top: float
    height: float
    width: float | None = None


@dataclass(frozen=True)
class Drawing:
    """The shapes of a map, with `left` pixels left of the data and RIGHT ones right of it; `top` is the data's.

    On a wide page `wide_left` pixels are left of the data.
    """

    shapes: tuple[Text | Stroke | Levels, ...]
    left: int
    wide_left: int
    top: int
    height: int


def map_drawing(shown: LayersMap, *, card: bool = False) -> Drawing:
    """Return the drawing of a map; in a `card` names are shorter, and one line is the legend."""
    inside = [mark for mark in shown.marks if shown.first_step <= mark.step < shown.last_step]
    lanes = _lanes(shown, inside, MOST_LANES - card)
    top = LANE * max((lane.number + 1 for lane in lanes if lane is not None), default=0) + 8
    bottom = top + sum(shown.pixels)
    letter, lengths = (CARD_LETTER, (CARD_LONGEST,) * 2) if card else (LETTER, LONGEST)
    rows = named_rows(shown, TEXT + (2 if card else 3))
    labels = [{row: _label(shown, row, longest) for row in rows} for longest in lengths]
    left, wide_left = (int(letter * max((len(t) for t in texts.values()), default=0)) + 16 for texts in labels)
    shapes: list[Text | Stroke | Levels] = [
        Levels(np.repeat(shown.levels, np.asarray(shown.pixels, np.intp), axis=0), 0, top, bottom - top)
    ]
    shapes += _names(shown, labels, top)
    shapes += _steps(shown, bottom)
    shapes += _marks(shown, inside, lanes, (top, bottom))
    shapes += _short_legend(shown, -left, bottom + 34) if card else _legend(shown, -left, bottom + 32)
    return Drawing(tuple(shapes), left, wide_left, top, bottom + (40 if card else 76))


def share_of(shown: LayersMap, step: int) -> float:
    """Return the place of a step's middle as a share of the data's width."""
    return (step + 0.5 - shown.first_step) / max(shown.last_step - shown.first_step, 1)


def _label(shown: LayersMap, row: int, longest: int) -> str:
    numbers = f" {shown.suspects[row]}" if row in shown.suspects else ""
    return brief(shown.names[row], max(longest - len(numbers), 12)) + numbers


def _names(shown: LayersMap, labels: Sequence[Mapping[int, str]], top: int) -> Iterator[Text | Stroke]:
    edges = np.concatenate([[0], np.cumsum(shown.pixels)]) + top
    for row, label in labels[0].items():
        middle = float(edges[row] + edges[row + 1]) / 2
        suspect = row in shown.suspects
        ink = "suspect" if suspect else "ink"
        yield Text(0, -13, middle, label, "end", ink, longer=labels[1][row])
        if suspect:
            yield Stroke(0, -10, -1, middle, middle, ink, 5)
        else:
            yield Stroke(0, -8, -3, middle, middle, "dim", 1)


def _steps(shown: LayersMap, bottom: int) -> Iterator[Text | Stroke]:
    yield Text(0, -26, bottom + 16, "step", "end", "dim")
    for step in _round_steps(shown):
        share = share_of(shown, step)
        yield Stroke(share, 0, 0, bottom, bottom + 4, "dim", 1, step)
        yield Text(share, 0, bottom + 16, str(step), "middle", "dim", step)


def _round_steps(shown: LayersMap) -> range:
    """Return some steps of a map at a round distance: 1, 2 or 5 times a power of ten."""
    wanted = max(1.0, (shown.last_step - shown.first_step) / ROUGHLY)
    power = 10 ** int(np.log10(wanted))
    distance = next(n * power for n in (1, 2, 5, 10) if n * power >= wanted)
    return range(-(-shown.first_step // distance) * distance, shown.last_step, distance)


@dataclass(frozen=True)
class Lane:
    """Where an incident's label stands: in which line above the data, left or right of its step, and its two ends."""

    number: int
    at: float
    low: float
    high: float

    @property
    def is_left(self) -> bool:
        """Whether the label ends at its step."""
        return self.high == self.at

    def is_apart_from(self, other: "Lane") -> bool:
        """Return whether neither label covers the other, or the line that comes down from the other."""
        if self.number == other.number:
            return self.high < other.low or self.low > other.high
        upper, lower = sorted((self, other), key=lambda lane: lane.number)
        return not lower.low < upper.at < lower.high


def _marks(
    shown: LayersMap, inside: Sequence[Mark], lanes: Sequence[Lane | None], data: tuple[int, int]
) -> Iterator[Text | Stroke]:
    """Draw each incident as a line from its label down to the data, and a tick below; nothing covers the data."""
    top, bottom = data
    for mark, lane in zip(inside, lanes, strict=True):
        share, begin = share_of(shown, mark.step), top - 7.0
        if lane is not None:
            y = LANE * (lane.number + 0.5)
            begin = min(begin, y - 5)
            beside, anchor = (-5, "end") if lane.is_left else (5, "start")
            yield Text(share, beside, y, mark.label, anchor, "mark", mark.step)
        yield Stroke(share, 0, 0, begin, top - 1, "mark", 2, mark.step)
        yield Stroke(share, 0, 0, bottom + 1, bottom + 6, "mark", 2, mark.step)


def _lanes(shown: LayersMap, inside: Sequence[Mark], most: int) -> list[Lane | None]:
    """Return the place of each incident's label on a telephone; None where there is no room for it.

    The last incident comes first, as its label has the least room.
    """
    taken: list[Lane] = []
    found: list[Lane | None] = []
    for mark in reversed(inside):
        at, long = share_of(shown, mark.step) * NARROW, LETTER * len(mark.label) + 8
        sides = [(at, at + long)] if at + long <= NARROW + RIGHT else []
        sides += [(at - long, at)]  # the names' column is empty there
        places = (Lane(number, at, *side) for number in range(most) for side in sides)
        lane = next((place for place in places if all(place.is_apart_from(other) for other in taken)), None)
        taken += [lane] if lane is not None else []
        found.append(lane)
    return found[::-1]


def _legend(shown: LayersMap, left: float, top: float) -> Iterator[Any]:
    """Draw the colour bar with its numbers, and what the two other colours mean."""
    width, height = BAR
    yield Levels(np.arange(2 * NEUTRAL + 1, dtype=np.uint8)[None], left, top, height, width)
    ends, half = f"{shown.limit:.3g}", f"{shown.limit / 2:.3g}"
    below = ((0.0, f"< -{ends}", "start"), (0.25, f"-{half}", "middle"))
    above = ((0.75, f"+{half}", "middle"), (1.0, f"> +{ends}", "end"))
    for share, text, anchor in (*below, (0.5, "usual", "middle"), *above):
        yield Text(0, left + share * width, top + height + 9, text, anchor, "dim")
    for row, (level, text) in enumerate(((NOT_FINITE, "not finite"), (NOT_KNOWN, "not known yet"))):
        x, y = left + width + 16, top + 16 * row
        yield Levels(np.full((1, 1), level, np.uint8), x, y, 10, 10)
        yield Text(0, x + 15, y + 5, text, "start", "dim")
    yield Text(0, left, top + height + 26, shown.unit, "start", "dim")


def _short_legend(shown: LayersMap, left: float, y: float) -> Iterator[Any]:
    """Draw the legend in one line."""
    width, height = CARD_BAR
    ends = f"{shown.limit:.3g}"
    yield Text(0, left, y, f"-{ends}", "start", "dim")
    yield Levels(np.arange(2 * NEUTRAL + 1, dtype=np.uint8)[None], left + 26, y - height / 2, height, width)
    yield Text(0, left + 32 + width, y, f"+{ends} robust deviations", "start", "dim")
    yield Levels(np.full((1, 1), NOT_FINITE, np.uint8), left + 254, y - 4, 8, 8)
    yield Text(0, left + 266, y, "not finite", "start", "dim")
