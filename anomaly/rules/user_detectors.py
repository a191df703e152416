"""Detectors of a user's own: functions and rules, named as `module:name` in the configuration."""

import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules import registry
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
        named = function if hasattr(function, "__name__") else type(function)
        self.name = f"{named.__module__}:{named.__name__}"

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the findings of the function."""
        return list(self._function(observed.record, observed.table))


def load_detectors(names: Iterable[str], folders: Sequence[str] = ()) -> list[DetectorFunction]:
    """Register the rules among the names, and return the functions; Python searches `folders` after its own.

    A function takes a step record and the table of its series, and returns findings
    (`trainsentry.anomaly.finding.Finding`), for example one for each row whose norm is above a bound. A class after
    `Rule` also has a sentence and a state of its own.

    Raises:
        ValueError: for a name that is not `module:name` or cannot be found, and for a rule whose name is taken.

    """
    sys.path.extend(folder for folder in folders if folder not in sys.path)
    found = []
    for name in names:
        module, _, attribute = name.partition(":")
        try:
            loaded = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"detect.detectors: {name!r} cannot be loaded ({error}); allowed: module:name, importable without "
                "the training script"
            ) from error
        if not isinstance(loaded, type):
            found.append(loaded)
        else:
            _register(name, loaded)
    return found


def _register(name: str, loaded: Any) -> None:
    """Register a rule, unless another configuration of this process has registered it.

    Raises:
        ValueError: for a class that is no rule, and for a rule whose name is taken.

    """
    missing = [member for member in ("name", "judge", "sentence") if not hasattr(loaded, member)]
    if missing:
        raise ValueError(
            f"detect.detectors: {name!r} has no {missing[0]!r}; allowed: a function, or a class after "
            "trainsentry.anomaly.rules.rule.Rule"
        )
    if registry.detector(loaded.name) is not loaded:
        registry.register(loaded)
