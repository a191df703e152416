"""`run.json`: what a run is and how it was started."""

import json
from pathlib import Path
from typing import Any, Final

from trainsentry.exporters.json_files import replace_json

SCHEMA_VERSION: Final = 1
"""Version of everything in the output directory; it changes when a reader would have to."""


def write_run(path: Path, start: dict[str, Any]) -> None:
    """Write the description of a run once; a later start in the same directory adds itself to `starts`."""
    moment = {key: start[key] for key in ("start_time", "start_step", "restart")}
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        known["starts"].append(moment)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        known = {"schema_version": SCHEMA_VERSION, **start, "starts": [moment]}
    replace_json(path, known)
