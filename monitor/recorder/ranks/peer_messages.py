"""Validates each message of another rank's recorder completely before any of it is used.

A rank of the run may still be broken. Its messages must neither raise in the middle of a comparison nor leave data
behind: a step that is not a number would make every later comparison fail.
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
"""The finished step of a rank that will send nothing more."""

LAST_STEP: Final = 2**53
"""The last valid step; a float cannot hold larger numbers exactly."""

MAX_ELEMENTS: Final = 2**44
"""Elements of a tensor at most: thirty times the parameters of the largest models."""

MAX_TEXT: Final = 2**14
"""Characters of a name or a sentence at most; the longest known series name has about 400."""

MAX_ITEMS: Final = 100_000
"""Items of a step in one message (calls, copies, anomalies, ranks) at most; 16 MB hardly hold more."""

MAX_INVALID: Final = 8
"""Invalid messages of one rank after which it is ignored."""

Check = Callable[[Any], bool]


class InvalidMessage(ValueError):
    """A message of another rank's recorder is invalid."""


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
    """Return a check for a dict with these members, optionally those of `maybe`, and no others."""
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


def _share(x: Any) -> bool:
    return _number(x) and 0 <= x <= 1


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

_SUMS: Final = _members(
    {"total": _number, "norm": _number, "numel": _TOTAL, "finite": _flag, "dtype": _text, "copied": _share}
)


def _sums_of_parameters(x: Any) -> bool:
    sums = _row(_number, _number, _TOTAL, _whole(1, 2**62))
    return isinstance(x, dict) and len(x) <= MAX_ITEMS and all(map(sums, x.values()))


def _camps(rank: Check) -> Check:
    camps = _each(_row(_number, _each(rank, least=1)), least=1)
    return lambda x: isinstance(x, dict) and len(x) <= MAX_ITEMS and all(map(_text, x)) and all(map(camps, x.values()))


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
    return _members(incident, {"again": _each(step), "returns": _SMALL})


_DEFINITIONS: Final = _members(dict.fromkeys(("series_from", "series", "layouts_from", "layouts"), lambda _: True))
"""`check_definitions` checks the rest, which depends on earlier definitions."""


class PeerMessages:
    """Checks the messages to one recorder; `ranks` are all ranks of the tree."""

    def __init__(self, ranks: Collection[int]) -> None:
        known = frozenset(ranks)
        rank: Check = lambda x: isinstance(x, int) and not isinstance(x, bool) and x in known  # noqa: E731
        token = _maybe(_whole(0, 2**53))
        anomalies = _each(_anomaly(rank))
        copy = _row(_whole(0, 2**63 - 1), rank, _whole(-(2**63), 2**63 - 1), _whole(-1, LAST_STEP))
        report = _row(rank, _NUMBER, _maybe(_square), *[_NUMBER] * 5)
        sums = {"ranks": _whole(1, 2**31), "first": rank, "sums": _sums_of_parameters, "alike": _flag}
        parts = {"step": _STEP, "told": _each(report), "calls": _each(_call(rank)), "copies": _each(copy)}
        parts |= {"numbers": _camps(rank)}
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
        """Decode and check a child's message.

        Raises:
            InvalidMessage: when it is invalid.

        """
        return _checked(data, self._of_child)

    def of_root(self, data: bytes) -> dict[str, Any]:
        """Decode and check a message of the root, which the parent forwards.

        Raises:
            InvalidMessage: when it is invalid.

        """
        return _checked(data, self._of_root)


def _checked(data: bytes, checks: Mapping[str, Check]) -> dict[str, Any]:
    try:
        message = messages.decode(data)
    except (ValueError, RecursionError) as error:
        raise InvalidMessage(f"not JSON: {type(error).__name__}") from None
    kind = message.get("type") if isinstance(message, dict) else None
    check = checks.get(kind) if isinstance(kind, str) else None
    if check is None or not check({key: value for key, value in message.items() if key != "type"}):
        raise InvalidMessage(f"an invalid message of type {str(kind)[:32]!r}")
    return message


def checked_record(data: bytes, table: SeriesTable) -> StepRecord:
    """Decode and check the record of a rank with the series of `table`.

    Raises:
        InvalidMessage: when it is invalid.

    """
    try:
        record = StepRecord.decode(data)
    except ValueError as error:
        raise InvalidMessage(str(error)) from None
    if not 0 <= record.step <= LAST_STEP:
        raise InvalidMessage(f"a record of step {record.step}")
    for ids, known in ((record.ids, len(table.series)), (record.layouts, len(table.layouts))):
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= known):
            raise InvalidMessage("a record with undefined series or layouts")
    return record


def check_definitions(definitions: Mapping[str, Any], table: SeriesTable) -> None:
    """Check that definitions are valid and leave no hole after those of `table`.

    Raises:
        InvalidMessage: when they are invalid.

    """
    for what, check in (("series", SERIES), ("layouts", LAYOUT)):
        begins, rows = definitions[f"{what}_from"], definitions[what]
        if not _whole(0, len(getattr(table, what)))(begins) or not _each(check, most=2**20)(rows):
            raise InvalidMessage(f"invalid {what}")
