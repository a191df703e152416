"""A step that does not end: the missing rank, and the collective that the others wait in."""

import math
from typing import Any, ClassVar, Final

from trainsentry.anomaly.anomaly import HANG, Anomaly, Detector
from trainsentry.collectors.series import COMMUNICATION_INPUT

SCORE: Final = 100.0
"""Deviations: a rule whose bound holds for any run; nobody waits that long without a fault."""

MISSING: Final = "seconds_missing"
"""The statistic of a hang of which the missing rank is known, and not the call that the others wait in."""


class HangRule(Detector):
    """Makes the anomaly of a hang from the report that a rank writes of it."""

    name: ClassVar[str] = "hang"
    speaks_for: ClassVar[str | None] = HANG
    compares_ranks: ClassVar[bool] = True

    @staticmethod
    def judge(report: dict[str, Any]) -> Anomaly:
        """Return the anomaly of a `hang.json`.

        Raises:
            KeyError, TypeError, IndexError: when it is no such report.

        """
        call, missing = report["call"], report["missing"]
        return Anomaly(
            step=report["step"],
            micro_step=0,
            rank=missing[0] if missing else report["rank"],
            order=0,
            name=f"{call['group']}.{call['op']}" if call else "step",
            quantity=COMMUNICATION_INPUT if call else "training",
            statistic="sequence" if call else MISSING if missing else "seconds",
            value=float(call["sequence"]) if call else report["seconds"],
            expected=math.nan,
            score=SCORE,
            detector=HangRule.name,
            kind=HANG,
            last_clean=report["step"] - 1,
        )

    @staticmethod
    def sentence(anomaly: Anomaly, _subject: str) -> str:
        """Return who is missing and where the others wait, or for how many seconds the step has not ended."""
        shown = "hang.json and hang_stacks.txt of each rank show where it is"
        if anomaly.statistic == MISSING:
            waited = f"other ranks have waited for it for {anomaly.value:.0f} s"
            return f"rank {anomaly.rank} is missing in step {anomaly.step}: {waited}; {shown}"
        if anomaly.statistic == "sequence":
            return (
                f"rank {anomaly.rank} is missing in step {anomaly.step}: other ranks wait for it in call "
                f"{anomaly.value:.0f} of {anomaly.name}; {shown}"
            )
        return f"step {anomaly.step} has not ended after {anomaly.value:.0f} s; {shown}"
