"""The verdict on one output of a call, and on a call."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

PASS: Final = "pass"  # noqa: S105 - a verdict
WARNING: Final = "warning"
ERROR: Final = "error"
SKIP: Final = "SKIP"
NOT_RUN: Final = " "
"""msprobe's words for the outcome; a blank stands for a direction that the dump does not have."""

_ORDER: Final = (ERROR, WARNING, PASS, SKIP)


@dataclass(frozen=True)
class Judgement:
    """A status, the name of the rule that decided, what it found, and how many times the limit the error is.

    `excess` orders failures, the worst first; it is 0 where there is none, and infinite for wrong shapes and crashes.
    """

    status: str
    rule: str
    reason: str
    excess: float = 0.0

    @property
    def message(self) -> str:
        """The rule and what it found, as the tables show them."""
        return f"{self.rule}: {self.reason}" if self.reason else self.rule


def worst(statuses: Iterable[str]) -> str:
    """Return the status of a call from those of its outputs; skipped outputs do not count beside others.

    >>> worst(["pass", "SKIP", "warning"]), worst(["SKIP"]), worst([])
    ('warning', 'SKIP', ' ')
    """
    found = set(statuses)
    return next((status for status in _ORDER if status in found), NOT_RUN)
