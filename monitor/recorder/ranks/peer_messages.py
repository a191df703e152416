"""What another rank's recorder may say: each message is looked at whole before any of it is kept.

A rank that belongs to the run may still be broken. What it says must neither raise in the midst of what the ranks do
together nor stay there: a step that is no number would, among those that are, make every later comparison fail.
"""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import SeriesTable
from trainsentry.monitor.recorder import messages

FOUND: Final = "found"
PARTS: Final = "parts"
DONE: Final = "done"
BACK: Final = "back"
END: Final = "end"
DEFINE: Final = "define"

ALL: Final = 2**62
"""The step that a rank has finished when nothing more will come from it."""

LAST_STEP: Final = 2**53
"""The last step that can be counted: beyond it, numbers of steps would not survive their way through a float."""

MAX_ELEMENTS: Final = 2**44
"""Elements of a tensor: thirty times as many as the largest models have parameters."""

MAX_TEXT: Final = 2**14
"""Characters of a name or a sentence; the longest name of a series that is known has some 400."""

MAX_ITEMS: Final = 100_000
"""Parts of a step in one message: calls, copies, anomalies, ranks. A message of 16 MB hardly holds more."""

MAX_INVALID: Final = 8
"""Messages of one rank that cannot be, or cannot be taken, until it is heard no more."""

Check = Callable[[Any], bool]


class InvalidMessage(ValueError):
    """What another rank's recorder says cannot be."""


def _whole(least: int, most: int) -> Check:
    return lambda x: isinstance(x, int) and not isinstance(x, bool) and least <= x <= most


def _number(x: Any) -> bool:
    return isinstance(x, float) or (isinstance(x, int) and not isinstance(x, bool) and abs(x) < 2**63)


def _maybe(check: Check) -> Check:
    return lambda x: x is None or check(x)


def _flag(x: Any) -> bool:
    return isinstance(x, bool)


def _text(x: Any) -> bool:
    return isinstance(x, str) and len(x) <= MAX_TEXT


def _each(check: Check, most: int = MAX_ITEMS, least: int = 0) -> Check:
    return lambda x: isinstance(x, list | tuple) and least <= len(x) <= most and all(map(check, x))


def _row(*checks: Check) -> Check:
    def holds(x: Any) -> bool:
        return isinstance(x, list) and len(x) == len(checks) and all(c(v) for c, v in zip(checks, x, strict=True))

    return holds


def _members(checks: Mapping[str, Check], maybe: Mapping[str, Check] | None = None) -> Check:
    """Whether a dict has members, those of `maybe` or not, and no others."""
    every = {**checks, **(maybe or {})}

    def holds(x: Any) -> bool:
        return (
            isinstance(x, dict)
            and checks.keys() <= x.keys() <= every.keys()
            and all(every[key](value) for key, value in x.items())
        )

    return holds


def _square(x: Any) -> bool:
    return _number(x) and (x >= 0 or math.isnan(x))


_STEP: Final = _whole(0, LAST_STEP)
_SMALL: Final = _whole(-(2**31), 2**31)
_COUNT: Final = _whole(0, MAX_ELEMENTS)
_TOTAL: Final = _whole(0, 2**62)
_SHAPE: Final = _each(_COUNT, most=64)
_NUMBER: Final = _maybe(_number)

SERIES: Final = _members(
    {"name": _text, "quantity": _text},
    {"micro_step": _SMALL, "index": _text, "module": _text, "vpp_stage": _SMALL, "scalar": _flag},
)
LAYOUT: Final = _row(_SHAPE, _text, _COUNT, _maybe(_SHAPE), _text)

_SUMS: Final = _members({"total": _number, "norm": _number, "numel": _TOTAL, "finite": _flag, "dtype": _text})


def _sums_of_parameters(x: Any) -> bool:
    return isinstance(x, dict) and len(x) <= MAX_ITEMS and all(map(_row(_number, _number), x.values()))


def _call(rank: Check) -> Check:
    position = _row(rank, _SMALL)
    output = _members({"total": _number, "finite": _flag, "places": _each(position, least=1)})
    asked = _members({"reduction": _SMALL, "count": _TOTAL, "ranks": _each(rank, least=1)})
    call = {"name": _text, "op": _text, "ranks": _whole(1, 2**31), "first": rank, "put_in": _SUMS, "got": _SUMS}
    call |= {"norms": _number, "longest": _TOTAL, "sizes": _each(_row(_TOTAL, _text)), "sources": _each(_SUMS)}
    call |= {"outputs": _each(output), "asked": _each(asked, least=1)}
    key = _row(_text, _text, _whole(-(2**63), 2**63), _whole(-(2**63), 2**63))
    return _members({"key": key, "size": _whole(0, 2**63), "call": _members(call)})


def _anomaly(rank: Check) -> Check:
    needed = {"step": _whole(-1, LAST_STEP), "micro_step": _SMALL, "rank": rank, "order": _SMALL}
    needed |= dict.fromkeys(("name", "quantity", "statistic", "detector", "kind"), _text)
    needed |= dict.fromkeys(("value", "expected", "score"), _NUMBER)
    return _members(needed, {"module": _text, "last_clean": _whole(-1, LAST_STEP), "passed_on": _flag, "alarm": _flag})


def _incident(rank: Check) -> Check:
    step = _whole(-1, LAST_STEP)
    suspect = {"step": step, "rank": rank, "score": _NUMBER}
    suspect |= dict.fromkeys(("name", "quantity", "statistic", "kind", "module", "evidence"), _text)
    incident = {"id": _whole(0, 2**53), "step": step, "rank": rank, "score": _NUMBER, "first_seen": step}
    incident |= dict.fromkeys(("name", "quantity", "statistic", "kind", "severity", "summary"), _text)
    incident |= {"last_seen": step, "suspects": _each(_members(suspect)), "actions": _each(_text)}
    return _members(incident)


_DEFINITIONS: Final = _members(dict.fromkeys(("series_from", "series", "layouts_from", "layouts"), lambda _: True))
"""The rest of them is looked at where it is known what was defined before."""


class PeerMessages:
    """Checks what is said to one recorder; `ranks` are all whose recorders belong together."""

    def __init__(self, ranks: Collection[int]) -> None:
        known = frozenset(ranks)
        rank: Check = lambda x: isinstance(x, int) and not isinstance(x, bool) and x in known  # noqa: E731
        token = _maybe(_whole(0, 2**53))
        anomalies = _each(_anomaly(rank))
        copy = _row(_whole(0, 2**63 - 1), rank, _whole(-(2**63), 2**63 - 1), _whole(-1, LAST_STEP))
        told = _row(rank, _NUMBER, _maybe(_square), _NUMBER, _NUMBER, _NUMBER, _NUMBER)
        sums = {"ranks": _whole(1, 2**31), "first": rank, "sums": _sums_of_parameters, "alike": _flag}
        parts = {"step": _STEP, "told": _each(told), "calls": _each(_call(rank)), "copies": _each(copy)}
        done: Check = lambda x: _whole(-1, LAST_STEP)(x) or x == ALL  # noqa: E731
        found = {"rank": rank, "step": _STEP, "anomalies": anomalies, "activations": _flag, "examined": _flag}
        self._of_child: dict[str, Check] = {
            BACK: _members({"step": _STEP}),
            DEFINE: _DEFINITIONS,
            PARTS: _members({**parts, "reductions": _maybe(_members(sums)), "found": anomalies}),
            DONE: _members({"rank": rank, "step": done}),
            FOUND: _members(found),
            messages.DATA_PARALLEL: _members({"rank": rank}),
            messages.ACTION: _members({"incident": _whole(0, 2**53), "action": _text}),
            messages.FLUSH: _members({"for": rank, "token": token}),
        }
        self._of_root: dict[str, Check] = {
            END: _members({}),
            messages.INCIDENT: _members({"incident": _incident(rank), "settled": _TOTAL}),
            messages.SUSPICION: _members({"step": _whole(-1, LAST_STEP)}),
            messages.EXAMINED: _members({"for": rank, "step": _STEP}),
            messages.FLUSHED: _members({"for": rank, "token": token}),
        }

    def of_child(self, data: bytes) -> dict[str, Any]:
        """Return the message of a rank that reports here.

        Raises:
            InvalidMessage: when it cannot be.

        """
        return _checked(data, self._of_child)

    def of_root(self, data: bytes) -> dict[str, Any]:
        """Return the message of the root, which a parent hands on.

        Raises:
            InvalidMessage: when it cannot be.

        """
        return _checked(data, self._of_root)


def _checked(data: bytes, checks: Mapping[str, Check]) -> dict[str, Any]:
    try:
        said = messages.decode(data)
    except (ValueError, RecursionError) as error:
        raise InvalidMessage(f"no JSON: {type(error).__name__}") from None
    kind = said.get("type") if isinstance(said, dict) else None
    check = checks.get(kind) if isinstance(kind, str) else None
    if check is None or not check({key: value for key, value in said.items() if key != "type"}):
        raise InvalidMessage(f"a message of the type {str(kind)[:32]!r} that cannot be")
    return said


def checked_record(data: bytes, table: SeriesTable) -> StepRecord:
    """Return the record of a rank whose series are those of `table`.

    Raises:
        InvalidMessage: when it cannot be.

    """
    try:
        record = StepRecord.decode(data)
    except ValueError as error:
        raise InvalidMessage(str(error)) from None
    if not 0 <= record.step <= LAST_STEP:
        raise InvalidMessage(f"a record of step {record.step}")
    for ids, known in ((record.ids, len(table.series)), (record.layouts, len(table.layouts))):
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= known):
            raise InvalidMessage("a record of series that are not defined")
    return record


def check_definitions(definitions: Mapping[str, Any], table: SeriesTable) -> None:
    """Check that definitions go on where those of `table` end, and are such.

    Raises:
        InvalidMessage: when they cannot be.

    """
    for what, check in (("series", SERIES), ("layouts", LAYOUT)):
        begins, rows = definitions[f"{what}_from"], definitions[what]
        if not _whole(0, len(getattr(table, what)))(begins) or not _each(check, most=2**20)(rows):
            raise InvalidMessage(f"{what} that cannot be")
