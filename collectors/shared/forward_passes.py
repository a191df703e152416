"""Counts the forward passes of a step and the module calls in each, and numbers the series of activations."""

from collections import Counter
from typing import Final

from trainsentry.collectors.series import (
    ACTIVATION_GRAD_INPUT,
    ACTIVATION_GRAD_OUTPUT,
    ACTIVATION_INPUT,
    ACTIVATION_OUTPUT,
    Series,
    SeriesTable,
)
from trainsentry.collectors.shared.model_graph import NamedModule

MAX_MICRO_STEPS: Final = 64
"""Forward passes recorded in one step; more are not accumulation, but for example evaluation with gradients on."""

MAX_CALLS: Final = 16
"""Calls of a module recorded in one pass; a cell called for each token would fill the record."""

_QUANTITIES: Final = {
    ("input", False): ACTIVATION_INPUT,
    ("output", False): ACTIVATION_OUTPUT,
    ("input", True): ACTIVATION_GRAD_INPUT,
    ("output", True): ACTIVATION_GRAD_OUTPUT,
}


class ForwardPasses:
    """Counts the passes through each outermost module (each is a micro-step), and each module's calls in a pass.

    A pass counts if gradients are enabled when its outermost module is entered. `left_out` counts passes and calls
    beyond the limits above, which are not recorded. A module's second call in a pass is named `<module>@1`.
    """

    def __init__(self, table: SeriesTable) -> None:
        self.table = table
        self.left_out = 0
        self.recording = False
        self.micro_step = 0
        self._depth = 0
        self._passes: Counter[tuple[str, int]] = Counter()
        self._calls: Counter[tuple[str, int]] = Counter()
        self._ids: dict[tuple[str, int, str, str, int, int, bool], int] = {}

    def open_step(self) -> None:
        """Begin a step."""
        self._depth, self.recording = 0, False
        self._passes.clear()

    def begins_with(self, named: NamedModule) -> bool:
        """Return whether entering this module begins a pass: no other module is running, or it is a root."""
        return self._depth == 0 or not named.name

    def begin(self, named: NamedModule, *, training: bool) -> None:
        """Note that an outermost module is entered; a pass after one that raised replaces it."""
        aborted = self._depth > 0
        self._depth = 0
        self._calls.clear()
        self.recording = training
        if not training:
            return
        key = (named.name, named.vpp_stage)
        if not aborted or not self._passes[key]:
            self._passes[key] += 1
        self.micro_step = self._passes[key] - 1
        if self.micro_step >= MAX_MICRO_STEPS:
            self.left_out += 1
            self.recording = False

    @property
    def is_first(self) -> bool:
        """Whether the pass is recorded, and the first through its outermost module in this step."""
        return self.recording and self.micro_step == 0

    def enter(self) -> None:
        """Note that a module is entered."""
        self._depth += 1

    def leave(self) -> None:
        """Note that a module is left."""
        self._depth = max(self._depth - 1, 0)

    def call_of(self, named: NamedModule) -> int | None:
        """Return the number of a module's current call in the pass; None for a call beyond the limit."""
        call = self._calls[named.name, named.vpp_stage]
        if call < MAX_CALLS:
            return call
        self.left_out += 1
        return None

    def called(self, named: NamedModule) -> None:
        """Note that a call of a module has ended."""
        self._calls[named.name, named.vpp_stage] += 1

    @property
    def micro_steps(self) -> int:
        """The largest number of passes through one outermost module in this step."""
        return max(self._passes.values(), default=0)

    def series(self, named: NamedModule, side: str, path: str, call: int, micro_step: int, *, gradient: bool) -> int:
        """Return the series id of a module's input or output (`side`), or of its gradient."""
        key = (named.name, named.vpp_stage, side, path, call, micro_step, gradient)
        found = self._ids.get(key)
        if found is None:
            module = f"{named.name}@{call}" if call else named.name
            name = f"{module}.{side}.{path}" if module else f"{side}.{path}"
            series = Series(name, _QUANTITIES[side, gradient], micro_step, path, named.name, named.vpp_stage)
            found = self._ids[key] = self.table.series_id(series)
        return found
