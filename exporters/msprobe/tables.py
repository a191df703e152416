"""Writes rows as msprobe's CSV tables or as its curves in TensorBoard, each record whole or not at all."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from trainsentry.collectors.series import SeriesTable
from trainsentry.exporters.csv.format import quote
from trainsentry.exporters.csv.writer import CsvWriter
from trainsentry.exporters.exporter import Lost
from trainsentry.exporters.msprobe.rows import TEXTS, MsprobeRow, texts_of

_WITH_MICRO_STEP: Final = frozenset({"actv", "actv_grad"})


class MsprobeTables(CsvWriter):
    """One table for each of msprobe's prefixes and `steps_per_file` steps, in a directory named as msprobe names it.

    `new_directory` gives the directory, and another one when the run goes back to an earlier step.
    """

    def __init__(
        self,
        new_directory: Callable[[], Path],
        ops: Sequence[str],
        *,
        digits: int,
        framework: str,
        steps_per_file: int,
        micro_steps: bool,
        lost: Lost,
    ) -> None:
        super().__init__(new_directory(), SeriesTable(), (), steps_per_file=steps_per_file, lost=lost)
        self.ops = tuple(ops)
        self.digits = digits
        self.framework = framework
        self._new_directory = new_directory
        self._with_micro_step = _WITH_MICRO_STEP | ({"grad_unreduced"} if micro_steps else set())

    def write_rows(self, step: int, _time: float, rows: Sequence[MsprobeRow]) -> None:
        """Append the rows of a step.

        Raises:
            OSError: when a table cannot be written; then no table holds any of the rows.

        """
        texts: dict[str, list[str]] = {}
        for row in rows:
            micro = f",{row.micro_step}" if row.micro_step is not None else ""
            numbers = ",".join(texts_of(row, self.ops, self.digits, self.framework))
            line = f"{row.vpp_stage},{quote(row.name)},{step}{micro},{numbers}\n"
            texts.setdefault(row.prefix, []).append(line)
        self._append(step, texts)

    def columns(self, table: str) -> Sequence[str]:
        """Return the header of a table."""
        micro = ("micro_step",) if table in self._with_micro_step else ()
        return ("vpp_stage", "name", "step", *micro, *self.ops)

    def roll_back(self, step: int) -> None:
        """Go on in another directory: msprobe's names have no number of the start."""
        del step
        self.close()
        self.directory = self._new_directory()


class MsprobeCurves:
    """One event file with msprobe's tags, `<chunk>:<name>:<micro-step>/rank<r>/<task>_<op>`."""

    def __init__(self, new_directory: Callable[[], Path], ops: Sequence[str], rank: int) -> None:
        from trainsentry.exporters.tensorboard.event_file import EventFile  # imports tensorboard: half a second

        self.ops = tuple(op for op in ops if op not in TEXTS)
        self.rank = rank
        self._new_directory = new_directory
        self._open: Callable[[Path], EventFile] = EventFile
        self._file: EventFile | None = None

    def write_rows(self, step: int, wall_time: float, rows: Sequence[MsprobeRow]) -> None:
        """Append an event with the statistics of the rows.

        Raises:
            OSError: when the file cannot be written; then it holds nothing of the rows.

        """
        if self._file is None:
            self._file = self._open(self._new_directory())
        size = self._file.size
        pairs = [(f"{row.tag(self.rank)}_{op}", row.value(op)) for row in rows for op in self.ops]
        try:
            self._file.write(step, wall_time or time.time(), [tag for tag, _ in pairs], [value for _, value in pairs])
        except OSError:
            self._file.cut_back(size)
            raise

    def roll_back(self, step: int) -> None:
        """Go on in another directory."""
        del step
        self.close()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
