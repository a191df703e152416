"""Reads the alerts that msprobe's monitor wrote, and puts them in its order: the earliest first."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainsentry.exporters.files.foreign_fields import Kind, anything, checked, text, whole
from trainsentry.exporters.files.foreign_files import MAX_OBJECT_BYTES, InputError, Report, read_object

FILE: Final = "anomaly.json"
FOLDER: Final = "anomaly_detected"

_FORWARD, _BACKWARD, _OPTIMIZER = 0, 1, 2
_STAGES: Final = {
    "actv": _FORWARD,
    **dict.fromkeys(("actv_grad", "pre_grad", "acc_grad", "post_grad"), _BACKWARD),
}

_FIELDS: Final[dict[str, Kind]] = {
    **dict.fromkeys(("rank", "step", "micro_step", "pp_stage", "vpp_stage", "call_id"), whole),
    "tag_name": text,
    "message": text,
    "group_mates": anything(list),
}


@dataclass(frozen=True)
class RecordedAlert:
    """One alert: its key in the file, and its members."""

    key: str
    members: dict[str, Any]

    @property
    def step(self) -> int:
        """The step of the alert."""
        return int(self.members["step"])

    @property
    def order(self) -> tuple[int, ...]:
        """The place in time: step, micro-step, stage of training, chunk and pipeline stage, call.

        Chunks and pipeline stages count upwards in the forward pass, and downwards after it. Weights and communication
        count as the optimizer's stage, where msprobe puts them before everything else.
        """
        found = self.members
        stage = _STAGES.get(str(found["tag_name"]).rpartition("/")[2], _OPTIMIZER)
        sign = 1 if stage == _FORWARD else -1
        chunk, pipeline = sign * found.get("vpp_stage", 0), sign * found.get("pp_stage", 0)
        return (self.step, found.get("micro_step", 0), stage, chunk, pipeline, found.get("call_id", -1))


def alert_files(directory: Path) -> list[Path]:
    """Return the ranks' `anomaly.json` in a directory, in its `anomaly_detected`, or the one of a rank's directory."""
    for place in (directory, directory / FOLDER):
        found = sorted(place.glob(f"rank*/{FILE}"), key=lambda path: (len(path.parent.name), path))
        if found:
            return found
    return [directory / FILE] if (directory / FILE).is_file() else []


def read_alerts(files: Iterable[Path], report: Report) -> list[RecordedAlert]:
    """Return the alerts in files, the earliest first; report entries that are none, and leave them out."""
    found: list[RecordedAlert] = []
    for path in files:
        try:
            content = read_object(path, MAX_OBJECT_BYTES)
        except (InputError, OSError) as error:
            report(path, 0, str(error).removeprefix(f"{path}: "))
            continue
        for key, entry in content.items():
            members = checked(entry, _FIELDS)
            if {"step", "tag_name"} <= members.keys():
                found.append(RecordedAlert(key, {"rank": 0, **members}))
            else:
                report(path, 0, f"{key!r}: not an alert: it needs step and tag_name")
    return sorted(found, key=lambda alert: alert.order)


def at_steps(alerts: Iterable[RecordedAlert], steps: Collection[int] | None) -> list[RecordedAlert]:
    """Return the alerts of some steps; of all without any."""
    return [alert for alert in alerts if not steps or alert.step in steps]
