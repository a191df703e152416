"""Detectors of a user's own: functions, named as `module:function` in the configuration."""

import importlib
import sys
from collections.abc import Callable, Iterable, Sequence

from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.rule import Observed
from trainsentry.anomaly.series_arrays import Mask
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import SeriesTable

DetectorFunction = Callable[[StepRecord, SeriesTable], Iterable[Finding]]
"""A user's detector: takes a step record and the table of its series, and returns findings."""


class UserDetector:
    """Calls a user's function where a rule is called; its findings carry the names of their detectors."""

    wrong_rows: Mask | None = None

    def __init__(self, function: DetectorFunction) -> None:
        self._function = function

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the findings of the function."""
        return list(self._function(observed.record, observed.table))


def load_detectors(names: Iterable[str], folders: Sequence[str] = ()) -> list[DetectorFunction]:
    """Return the functions; `folders` are searched for modules after those that Python searches.

    A detector takes a step record and the table of its series, and returns findings
    (`trainsentry.anomaly.finding.Finding`), for example one for each row whose norm is above a bound.

    Raises:
        ValueError: for a name that is not `module:function`, or that cannot be found.

    """
    sys.path.extend(folder for folder in folders if folder not in sys.path)
    found = []
    for name in names:
        module, _, function = name.partition(":")
        try:
            found.append(getattr(importlib.import_module(module), function))
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"detect.detectors: {name!r} cannot be loaded ({error}); allowed: module:function, importable without "
                "the training script"
            ) from error
    return found
