"""Selects the calls that a debugger records: by level, name, range, direction, and calls of the model."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Final

LEVELS: Final = ("L0", "L1", "mix", "debug")
RISKS: Final = {"ALL": {"LOW", "FOCUS", "CORE"}, "FOCUS": {"FOCUS", "CORE"}, "CORE": {"CORE"}}
"""Risk levels that each setting of `risk_level` records."""


@dataclass
class CallSelection:
    """Decides for each call whether it is recorded.

    `parts` are names or parts of names (`list`); at level mix, a selected module includes everything inside it. `scope`
    is a first and a last name. `risk` is a level of `RISKS` for operations, `risk_of` returns the level of one; both
    apply only where neither names nor a scope are given.
    """

    level: str = "L1"
    parts: tuple[str, ...] = ()
    scope: tuple[str, str] | None = None
    directions: frozenset[str] = frozenset({"forward", "backward"})
    sides: frozenset[str] = frozenset({"input", "output"})
    risk: str = "FOCUS"
    risk_of: Callable[[str], str] = field(default=lambda _: "CORE")
    _inside: bool = False

    @property
    def sees_modules(self) -> bool:
        """Whether calls of modules are recorded."""
        return self.level in {"L0", "mix"}

    @property
    def sees_operations(self) -> bool:
        """Whether calls of operations are recorded."""
        return self.level in {"L1", "mix"}

    def begins(self, call: Any, direction: str) -> bool:
        """Whether a call that begins is recorded."""
        if self.scope is not None and call.name(direction) == self.scope[0]:
            self._inside = True
        return self.may_begin(call, direction) and (self.scope is None or self._inside)

    def may_begin(self, call: Any, direction: str) -> bool:
        """Whether a call may be recorded; with a `scope`, this is certain only when it begins."""
        if direction not in self.directions:
            return False
        if self.scope is not None:
            return True
        if not self.parts:
            return call.is_module or self.risk_of(call.stem) in RISKS[self.risk]
        if self.level == "mix":
            return bool(call.is_in(self.parts, direction))
        name = call.name(direction)
        return any(part in name for part in self.parts)

    def ends(self, call: Any, direction: str) -> None:
        """Note the end of a call."""
        if self.scope is not None and call.name(direction) == self.scope[1]:
            self._inside = False

    def reset(self) -> None:
        """Leave the scope: another step begins."""
        self._inside = False


def is_listed(name: str, only: Collection[str], without: Collection[str]) -> bool:
    """Whether a call such as `Functional.linear.3` is chosen: `linear`, `Functional.linear` and its own name name it.

    >>> is_listed("Functional.linear.3", ["linear"], []), is_listed("Functional.linear.3", [], ["Functional.linear"])
    (True, False)
    """
    if not only and not without:
        return True
    stem = name.rpartition(".")[0]
    names = (name, stem, stem.partition(".")[2])
    return (not only or any(n in only for n in names)) and not any(n in without for n in names)


class TokenRange:
    """Starts a dump at a model's call number `first`, counted from 0, and stops it after number `last`."""

    def __init__(self, first: int, last: int, start: Callable[[], None], stop: Callable[[], None]) -> None:
        self._first, self._last = first, last
        self._start, self._stop = start, stop
        self._calls = 0

    def begin_call(self) -> None:
        """Note that a call of the model begins."""
        if self._first <= self._calls <= self._last:
            self._start()

    def end_call(self) -> None:
        """Note that a call of the model has ended."""
        self._calls += 1
        self._stop()
