"""The table of exporters. A new exporter is a file of its own and one line here."""

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from importlib.util import find_spec
from typing import Any, Final

from trainsentry.collectors.record import StepRecord
from trainsentry.exporters.exporter import ExporterEntry, ExportPlace

EXPORTERS: Final = {
    "csv": "trainsentry.exporters.csv.exporter:CSV",
    "tensorboard": "trainsentry.exporters.tensorboard.exporter:TENSORBOARD",
    "msprobe": "trainsentry.exporters.msprobe.exporter:MSPROBE",
    "report": "trainsentry.exporters.report.exporter:REPORT",
    "prometheus": "trainsentry.exporters.metrics.prometheus:PROMETHEUS",
    "opentelemetry": "trainsentry.exporters.metrics.open_telemetry:OPEN_TELEMETRY",
    "webhook": "trainsentry.exporters.webhook:WEBHOOK",
    "wandb": "trainsentry.exporters.experiment_log:WANDB",
    "mlflow": "trainsentry.exporters.experiment_log:MLFLOW",
}
"""Each exporter's `ExporterEntry` as `module:name`, by its key under `export`, in the order of the configuration.

The trainer imports all of these modules to read a configuration, and the recorder imports those that are switched on.
So none of them imports a framework, pydantic or a package of `needs` before its exporter runs.
"""

_registered: dict[str, str] = {}

NOT_EXPORTERS: Final = ("max_wait",)
"""Keys under `export` that are settings of the recorder."""


def register_exporter(name: str) -> None:
    """Add an exporter of your own; call this before `TrainMonitor(...)`.

    `name` is `module:name` of an `ExporterEntry`, as in "my_exporters:PARQUET". The recorder is another Python process
    and imports the same module there, so it must be importable without the training script.

    Raises:
        ValueError: for a name that does not lead to a usable entry, or a key that is taken.

    """
    entry = load_entry(name)
    taken = {**EXPORTERS, **dict.fromkeys(NOT_EXPORTERS, "a setting"), **_registered}.get(entry.key, name)
    if taken != name:
        raise ValueError(f"register_exporter: the key {entry.key!r} is taken by {taken}; allowed: another key")
    problem = _problem_of(entry)
    if problem is not None:
        raise ValueError(f"register_exporter: {name!r}: {problem}")
    _registered[entry.key] = name


def table() -> dict[str, str]:
    """Return the table with the exporters registered so far: `module:name` of each entry, by key."""
    return {**EXPORTERS, **_registered}


def user_folders() -> list[str]:
    """Return the folders in which the recorder finds the registered modules; none when nothing is registered."""
    return [folder for folder in sys.path if folder] if _registered else []


def load_entry(name: str, folders: Sequence[str] = ()) -> ExporterEntry:
    """Return the entry that `module:name` names; Python searches `folders` after its own.

    Raises:
        ValueError: when it cannot be imported, or is not an `ExporterEntry`.

    """
    sys.path.extend(folder for folder in folders if folder not in sys.path)
    allowed = "allowed: module:name of an ExporterEntry, importable without the training script"
    module, _, attribute = name.partition(":")
    if module == "__main__":
        raise ValueError(f"exporter {name!r} cannot be loaded: the recorder runs another __main__; {allowed}")
    try:
        entry = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"exporter {name!r} cannot be loaded ({error}); {allowed}") from error
    if not isinstance(entry, ExporterEntry):
        raise ValueError(f"exporter {name!r} is a {type(entry).__name__}; {allowed}")  # noqa: TRY004 - a wrong name
    return entry


def _problem_of(entry: ExporterEntry) -> str | None:
    """Return the reason why the configuration cannot have a block for an entry."""
    if not entry.key.isidentifier():
        return f"key: {entry.key!r}; allowed: letters, digits and underscores"
    if entry.block is None:
        return None
    if not is_dataclass(entry.block):
        return f"block: {entry.block!r}; allowed: a frozen dataclass, or None"
    lacking = [f.name for f in fields(entry.block) if f.default is MISSING and f.default_factory is MISSING]
    return f"block: {lacking[0]!r} has no default; allowed: a default for every field" if lacking else None


def switched_on(
    export: Mapping[str, Any], names: Mapping[str, str], folders: Sequence[str] = ()
) -> Iterator[tuple[ExporterEntry, Any]]:
    """Yield the exporters of the table `names` that a configuration switches on, each with its block.

    `export` is that part of the configuration as plain data. An entry that cannot be loaded in this process becomes one
    that fails at every record, so that the others go on.
    """
    for key, name in names.items():
        values = export.get(key)
        if values is None or values is False:
            continue
        try:
            entry = load_entry(name, folders)
            block = None if entry.block is None else entry.block(**values)
        except Exception as error:  # noqa: BLE001 - a user's module may raise anything
            entry, block = ExporterEntry(key, _failing(error), places=("rank",)), None
        yield entry, block


def missing_package(entry: ExporterEntry, block: Any) -> str | None:
    """Return the error for the first package that an exporter needs and that is not installed."""
    for needed in entry.needs:
        if needed.setting is not None and getattr(block, needed.setting) != needed.value:
            continue
        if not _is_installed(needed.module):
            key = f"export.{entry.key}" if needed.setting is None else f"export.{entry.key}.{needed.setting}"
            return f"{key}: {needed.missing}"
    return None


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # a package above it is missing
        return False


def make_exporter(entry: ExporterEntry, block: Any, place: ExportPlace) -> Any:
    """Return an entry's exporter for a place; if making it fails, one whose every write raises the error."""
    try:
        return entry.make(block, place)
    except Exception as error:  # noqa: BLE001 - one exporter must not stop the recording
        return Unmade(error)


def _failing(error: Exception) -> Any:
    def make(_: Any, __: ExportPlace) -> Any:
        return Unmade(error)

    return make


class Unmade:
    """Takes the place of an exporter that could not be made: every call but `close` raises the reason."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __call__(self, _: Any) -> None:
        """Raise the reason."""
        raise self._error.with_traceback(None)

    def write(self, _: StepRecord) -> None:
        """Raise the reason."""
        raise self._error.with_traceback(None)

    def begin(self) -> None:
        """Raise the reason."""
        raise self._error.with_traceback(None)

    def renew(self, *, now: bool = False) -> None:
        """Raise the reason."""
        raise self._error.with_traceback(None)

    def close(self) -> None:
        """Do nothing: nothing was opened."""
