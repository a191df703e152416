"""The interface between the recorder and its exporters: an exporter's table entry, its place and its methods."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import SeriesTable

Lost = Callable[[int, int, str], None]
"""Receives the first and the last step of records that were written and have disappeared, and the reason."""


def nothing_lost(first: int, last: int, reason: str) -> None:
    """Ignore lost records: nobody keeps a list of gaps."""


Missing = Callable[[], Sequence[Mapping[str, Any]]]
"""Returns the steps that have not reached an exporter so far: `first_step`, `last_step` and `reason`."""


def nothing_missing() -> Sequence[Mapping[str, Any]]:
    """Return nothing: every step has come."""
    return ()


LeftOut = Callable[[str], None]
"""Receives what an exporter leaves out by its settings, as a sentence; an empty one when that is nothing."""


def nothing_left_out(sentence: str) -> None:
    """Ignore what is left out."""


@dataclass(frozen=True)
class ExportPlace:
    """Where one exporter works, and the facts of its run.

    `directory` is the rank's own (`rank0`), or `global` for statistics over all ranks. `table` resolves the series ids
    of the records. `statistics` are the configured columns of numbers; with `histograms`, records have those too.
    `restart` numbers the starts in this directory. A run that is `beside` another one in the same `output_dir` must not
    write to names that the other one uses.
    """

    output_dir: Path
    directory: Path
    rank: int
    table: SeriesTable
    statistics: tuple[str, ...]
    start_step: int = 0
    restart: int = 0
    beside: bool = False
    lost: Lost = nothing_lost
    missing: Missing = nothing_missing
    left_out: LeftOut = nothing_left_out
    histograms: bool = False


@dataclass(frozen=True)
class Needed:
    """A package that an exporter needs, and the error that the user reads without it.

    `module` is the import name. With `setting`, the package is needed only where that field of the block has `value`.
    `missing` follows the key: "wandb is not installed; allowed: pip install wandb".
    """

    module: str
    missing: str
    setting: str | None = None
    value: Any = None


Place = Literal["rank", "rank 0", "global"]
Moment = Literal["record", "status", "incident", "end"]


@dataclass(frozen=True)
class ExporterEntry:
    """An exporter as the table lists it.

    `key` is its name under `export`. `block` is a frozen dataclass of its settings in which every field has a default;
    `setting` gives a field its meaning, unit and limits for the configuration. Without a block the key is
    only true or false, and `meaning` describes it. With `on`, the exporter runs by default.

    `make(block, place)` returns the object or function that runs at the moment `at`:

    | `at`       | result                         | called                                                     |
    |------------|--------------------------------|------------------------------------------------------------|
    | `record`   | an `Exporter`                  | at every record, in `places`, in a thread of its own       |
    | `status`   | a `StatusExporter`             | each time a rank renews its status, in a thread of its own |
    | `incident` | a function of the incident     | once per settled incident, where incidents are made        |
    | `end`      | a function of their number     | when a run has ended, where incidents are made             |

    `incident` and `end` functions must return at once: they start a process of their own. The recorder waits for an
    exporter that is `patient` at each record, at most `export.max_wait` seconds per trouble; for others it never waits.
    """

    key: str
    make: Callable[[Any, ExportPlace], Any]
    block: type[Any] | None = None
    on: bool = False
    at: Moment = "record"
    places: tuple[Place, ...] = ("rank", "global")
    patient: bool = True
    needs: tuple[Needed, ...] = ()
    meaning: str = ""


def setting(default: Any, meaning: str, *, unit: str = "", **limits: Any) -> Any:
    """Return a field of an exporter's block: its default, its meaning and unit for the reference, and its limits.

    `limits` are keyword arguments of `pydantic.Field`: `ge`, `le`, `pattern`, …
    """
    metadata = {"description": meaning, "unit": unit, **limits}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


class Exporter(Protocol):
    """Writes step records somewhere.

    An `OSError` means that it cannot write now: no part of the record stays in the file, and the recorder tries again.
    Any other exception is a fault, and the record is left out.
    """

    def write(self, record: StepRecord) -> None:
        """Write a record; when this returns, the record outlives the trainer."""

    def close(self) -> None:
        """Finish and release files."""


@runtime_checkable
class OpeningExporter(Exporter, Protocol):
    """An exporter whose start takes long, so that it starts in its own thread."""

    def open(self) -> None:
        """Start; this is called once, before the first record."""


@runtime_checkable
class ScalarExporter(Exporter, Protocol):
    """An exporter that also shows numbers that are in no record."""

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write numbers by name."""


@runtime_checkable
class IncidentExporter(Exporter, Protocol):
    """An exporter that also shows incidents."""

    def write_incident(self, incident: Any) -> None:
        """Write an incident (`anomaly.incident.Incident`); it comes again when its ranking changes."""


@runtime_checkable
class SettingsExporter(Exporter, Protocol):
    """An exporter that also shows the run's configuration."""

    def write_settings(self, run: Mapping[str, Any]) -> None:
        """Write the content of `run.json`."""


@runtime_checkable
class RestartingExporter(Exporter, Protocol):
    """An exporter that opens new files when a run goes back to an earlier step; `restart` is their number."""

    restart: int

    def roll_back(self, step: int) -> None:
        """Continue from an earlier step in new files."""


class StatusExporter(Protocol):
    """Shows the state of a run outside its files."""

    def begin(self) -> None:
        """Start; an `OSError` means that it cannot start now."""

    def renew(self, *, now: bool = False) -> None:
        """Show the present state if it is time, and always with `now`."""
