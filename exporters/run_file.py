"""`run.json`: what a run is and how it was started."""

from pathlib import Path
from typing import Any, Final

from trainsentry.exporters.foreign_files import NotOurs, read_object
from trainsentry.exporters.json_files import replace_json

SCHEMA_VERSION: Final = 1
"""Version of everything in the output directory; it changes when a reader would have to."""


def write_run(path: Path, start: dict[str, Any]) -> None:
    """Write the description of a run once; a later start in the same directory adds itself to `starts`."""
    moment = {key: start[key] for key in ("start_time", "start_step", "restart")}
    try:
        known = read_object(path)
        known["starts"].append(moment)
    except (OSError, NotOurs, KeyError, AttributeError):
        known = {"schema_version": SCHEMA_VERSION, **start, "starts": [moment]}
    replace_json(path, known)
