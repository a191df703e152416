"""The alerts of msprobe's monitor: its two rules, and its `anomaly.json`.

They are what msprobe defines, for scripts that read the file. Incidents come from our own detectors.
"""

import contextlib
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from trainsentry.exporters.files.json_files import replace_json
from trainsentry.exporters.msprobe.rows import TEXTS, MsprobeRow

BETA: Final = 0.99
"""Weight of the past in the moving average of a statistic's size, as msprobe has it."""

MOST_ALERTS: Final = 10_000
"""Alerts in a file at most; the first ones, as the ranking looks for the earliest."""

WRITE_SECONDS: Final = 1.0
"""Seconds between two writes of the file, which is replaced as a whole."""


class MsprobeAlerts:
    """Applies the rules to each row, and keeps the alerts for `<root>/anomaly_detected/rank<r>/anomaly.json`.

    `turbulence`: |value| > average·(1 + threshold), for `norm` and `mean`; None switches it off. `nan`: NaN,
    or |value| > `size`. The average is msprobe's moving average, with one difference: NaN and Inf do not enter it, so
    that a rule still works after them.
    """

    def __init__(
        self, root: Path, rank: int, ops: Sequence[str], *, turbulence: float | None, nan: bool, size: float | None
    ) -> None:
        self.path = root / "anomaly_detected" / f"rank{rank}" / "anomaly.json"
        self.rank = rank
        self.ops = tuple(op for op in ops if op not in TEXTS and op != "id")
        self.turbulence = turbulence
        self.nan = nan
        self.size = size if size is not None else math.inf
        self.alerts: dict[str, dict[str, Any]] = {}
        self._averages: dict[tuple[str, str], float] = {}
        self._changed = False
        self._written_at = -math.inf

    def judge(self, step: int, rows: Sequence[MsprobeRow]) -> None:
        """Judge the rows of a step, learn from them, and write the file if it is time."""
        for call, row in enumerate(rows):
            tag = row.tag(self.rank)
            for op in self.ops:
                value = row.value(op)
                average = self._learn(tag, op, value)
                rule = self._rule(op, value, average)
                if rule is not None:
                    self._note(row, tag, op, step, call, f"current value {value}, history mean {average}", rule)
        if self._changed and time.monotonic() - self._written_at >= WRITE_SECONDS:
            self.write()

    def _learn(self, tag: str, op: str, value: float) -> float:
        """Return the average before this value."""
        average = self._averages.get((tag, op), abs(value))
        if math.isfinite(value):
            known = average if math.isfinite(average) else abs(value)
            self._averages[tag, op] = BETA * known + (1 - BETA) * abs(value)
        return average

    def _rule(self, op: str, value: float, average: float) -> str | None:
        if self.nan and (math.isnan(value) or abs(value) > self.size):
            return "AnomalyNan"
        turbulent = self.turbulence is not None and op in {"norm", "mean"}
        return "AnomalyTurbulence" if turbulent and abs(value) > average * (1 + (self.turbulence or 0.0)) else None

    def _note(self, row: MsprobeRow, tag: str, op: str, step: int, call: int, numbers: str, rule: str) -> None:
        key = f"{tag}_step_{step}_call_{call}"
        if key not in self.alerts and len(self.alerts) >= MOST_ALERTS:
            return
        self._changed = True
        self.alerts[key] = {
            "rank": self.rank,
            "step": step,
            "micro_step": 0,
            "pp_stage": self.rank,
            "vpp_stage": row.vpp_stage,
            "call_id": call,
            "tag_name": tag,
            "message": f"Rule {rule} reports anomaly signal in {(tag, op)} at step {step}, {numbers}.",
            "group_mates": [self.rank],
        }

    def write(self) -> None:
        """Replace the file; a disk that is full now gets it later."""
        self._written_at = time.monotonic()
        with contextlib.suppress(OSError):
            replace_json(self.path, self.alerts)
            self._changed = False
