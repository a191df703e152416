"""Records how much of a table has been converted, so that a later conversion continues there."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from glob import escape
from pathlib import Path
from typing import Any, Final

from trainsentry.exporters.csv.chunks import Reading
from trainsentry.exporters.csv.format import TableFile
from trainsentry.exporters.csv.pieces import line_count
from trainsentry.exporters.files.foreign_fields import Kind, anything, checked, whole
from trainsentry.exporters.files.foreign_files import InputError, read_object
from trainsentry.exporters.files.json_files import replace_json
from trainsentry.exporters.tensorboard.event_file import EVENTS

STATE_VERSION: Final = 6

UNFINISHED: Final = ".converting"
"""Prefix of an event file that is being written; TensorBoard ignores it."""

_STATE: Final[dict[str, Kind]] = {
    **dict.fromkeys(("version", "last_step", "parts"), whole),
    **dict.fromkeys(("choice", "files", "events"), anything(dict)),
    "thinned": anything(bool),
    "awake": anything(list),
}


@dataclass(frozen=True)
class Choice:
    """Which values of a table are converted: steps `first` to `last`, every `every`-th, thinned unless `full`.

    Above `raw_tags` tags (-1: no limit) only the layers' norms and the numbers over all layers are written; with 0 only
    the latter. `pages` adds the numbers over all layers and pictures of layers over steps; `flat_zeros` adds counts and
    shares that are 0 throughout.
    """

    first: int = 0
    last: int | None = None
    every: int = 1
    full: bool = False
    raw_tags: int = -1
    pages: bool = False
    flat_zeros: bool = False

    def has(self, step: int) -> bool:
        """Return whether a step is converted."""
        return step >= self.first and (self.last is None or step <= self.last) and step % self.every == 0


@dataclass(frozen=True)
class Table:
    """A table to convert: run, name, files, and the directory and name suffix of its event files."""

    run: str
    name: str
    files: tuple[TableFile, ...]
    directory: Path
    suffix: str


def _block(file: TableFile) -> str:
    """Return a block's name without the suffix of its form."""
    return str(file.path.with_name(file.path.name.partition(".csv")[0].removesuffix(".parquet")))


def _event_files(table: Table) -> list[Path]:
    return list(table.directory.glob(f"{EVENTS}.*{escape(table.suffix)}.*"))


def _sizes(table: Table) -> dict[str, int]:
    """Return the size of each event file of a table; a changed size means the table is converted from the start."""
    return {path.name: path.stat().st_size for path in _event_files(table)}


class ConversionState:
    """The state of a table's conversion, in a file next to the event files."""

    def __init__(self, path: Path, data: dict[str, Any]) -> None:
        self.path = path
        self.data = data

    @classmethod
    def load(cls, table: Table) -> "ConversionState":
        """Load the state of a table; empty if it cannot be read."""
        path = table.directory / f"{table.suffix}.json"
        try:
            data = checked(read_object(path), _STATE)
        except (OSError, InputError):
            data = {}
        return cls(path, data if data.get("version") == STATE_VERSION else {})

    @property
    def last_step(self) -> int | None:
        """The last step that was written."""
        return self.data.get("last_step")

    @property
    def awake(self) -> list[str]:
        """The tags of counts and shares that were written, having been other than 0 once."""
        return [tag for tag in self.data.get("awake", []) if isinstance(tag, str)]

    @property
    def part(self) -> int:
        """The number of the next event file."""
        return int(self.data.get("parts", 0))

    def go_on(self, table: Table, choice: Choice) -> list[Reading] | None:
        """Return the unread parts of a table, empty if up to date; None if it must be converted from the start."""
        written = self.data.get("events")
        if not written or self.data.get("choice") != asdict(choice) or _sizes(table) != written:
            return None
        known = {block: _numbers(read) for block, read in self.data.get("files", {}).items()}
        if not known.keys() <= {_block(file) for file in table.files}:
            return None
        readings = []
        for file in table.files:
            offset, lines, rows = known.get(_block(file), (0, 0, 0))
            if file.path.suffix != ".csv" and rows:  # a block that was read as CSV and compacted since
                if line_count(file.path) - 1 != (rows if file.path.suffix == ".parquet" else lines or rows):
                    return None
                continue
            size = file.path.stat().st_size
            if size < offset:
                return None
            if size > offset:
                readings.append(Reading(file, offset, lines, rows))
        return None if readings and self.data.get("thinned") else readings

    def forget(self, table: Table) -> None:
        """Remove the table's event files, including those of an interrupted conversion."""
        self.data = {}
        for old in [*_event_files(table), *table.directory.glob(f"{UNFINISHED}.*{escape(table.suffix)}.*")]:
            old.unlink()

    def save(
        self,
        table: Table,
        choice: Choice,
        readings: Sequence[Reading],
        last_step: int | None,
        *,
        thinned: bool,
        awake: Sequence[str],
    ) -> None:
        """Save the state after a conversion."""
        files = dict(self.data.get("files", {})) | {_block(r.file): (r.offset, r.lines, r.rows) for r in readings}
        data = {"version": STATE_VERSION, "choice": asdict(choice), "files": files, "last_step": last_step}
        data["awake"] = list(awake)
        replace_json(self.path, data | {"parts": self.part + 1, "events": _sizes(table), "thinned": thinned})


def _numbers(read: Any) -> tuple[int, int, int]:
    """Return the bytes, lines and rows read of a block; zeros if the state is malformed."""
    known = [whole(n) for n in read] if isinstance(read, list) and len(read) == 3 else []
    return (known[0] or 0, known[1] or 0, known[2] or 0) if len(known) == 3 else (0, 0, 0)
