"""Which calls of a debugger are recorded: levels, names, a range of calls, directions, inputs and outputs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

LEVELS: Final = ("L0", "L1", "mix", "debug")
RISKS: Final = {"ALL": {"LOW", "FOCUS", "CORE"}, "FOCUS": {"FOCUS", "CORE"}, "CORE": {"CORE"}}


@dataclass
class CallSelection:
    """Says for each call whether it is recorded.

    `parts` are names or parts of names (`list`): at level mix a module takes everything inside it along. `scope` is
    a first and a last name. `risk` is a level of `RISKS` for operations, `risk_of` tells that of one; it counts only
    where neither names nor a scope are given.
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
        """Whether a call can be recorded at all; with a `scope` that is known only when it begins."""
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
        """Begin anew with the next step."""
        self._inside = False
