"""Detectors of the user's own: functions, named as `module:function`."""

import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any


def load_detectors(names: Iterable[str], folders: Sequence[str] = ()) -> list[Callable[..., Any]]:
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
