"""Writes msprobe's two tables of an accuracy check, and takes them up again after an interruption."""

import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from trainsentry.exporters.files.foreign_files import MAX_OBJECT_BYTES, InputError, read_bytes
from trainsentry.exporters.files.json_files import cut_torn_line
from trainsentry.exporters.files.whole_writes import append_whole

RESULT_COLUMNS: Final = ("API name", "Forward Test Success", "Backward Test Success", "Message")

DETAIL_COLUMNS: Final = (
    "API Name", "Bench Dtype", "DEVICE Dtype", "Shape", "余弦相似度", "最大绝对误差", "双百指标", "双千指标",
    "双万指标", "二进制一致错误率", "误差均衡性", "均方根误差", "小值域错误占比", "相对误差最大值", "相对误差平均值",
    "inf/nan错误率", "相对误差错误率", "绝对误差错误率", "ULP误差最大值", "ULP误差平均值", "ULP误差大于阈值占比",
    "Status", "Message",
)  # fmt: skip
"""Columns of the details: cosine, maximal absolute error, shares of relative errors below 0.01, 0.001 and 0.0001, share
of different elements, balance of the errors' signs, root mean square error, share of wrong small elements, maximal and
mean relative error, shares of wrong NaN and Inf, relative and absolute errors, maximal and mean error in units in the
last place, share of elements with many. msprobe's scripts look them up by these names."""

MARK: Final = "\ufeff".encode()
"""The mark of UTF-8 that msprobe's tables begin with: without it, Excel shows other letters."""

_RESULT_NAME: Final = re.compile(r"accuracy_checking_result_(\d{14})\.csv", re.ASCII)


class AccuracyTables:
    """The two tables of a check; a call's details are written before its result, which makes them count.

    `done` are the calls that a table that was taken up again holds, with their rows.
    """

    def __init__(self, result: Path, details: Path) -> None:
        self.result = result
        self.details = details
        self.done: dict[str, list[str]] = {}

    @classmethod
    def new(cls, directory: Path, timestamp: str) -> "AccuracyTables":
        """Begin tables in a directory; `timestamp` is 14 digits, YYYYmmddHHMMSS.

        Raises:
            InputError: when there are tables of that name.
            OSError: when they cannot be written.

        """
        directory.mkdir(parents=True, exist_ok=True)
        tables = cls(
            directory / f"accuracy_checking_result_{timestamp}.csv",
            directory / f"accuracy_checking_details_{timestamp}.csv",
        )
        for path, columns in ((tables.result, RESULT_COLUMNS), (tables.details, DETAIL_COLUMNS)):
            try:
                with path.open("xb") as file:
                    file.write(MARK + _lines([columns]))
            except FileExistsError:
                raise InputError(f"{path}: exists; --resume continues it") from None
        return tables

    @classmethod
    def resume(cls, result: Path) -> "AccuracyTables":
        """Take up the tables of an interrupted check: rows of a call that was not finished are removed.

        Raises:
            InputError: when `result` is no such table, or its details are missing.
            OSError: when they cannot be read or written.

        """
        named = _RESULT_NAME.fullmatch(result.name)
        if named is None:
            raise InputError(f"{result}: allowed: a file named accuracy_checking_result_<14 digits>.csv")
        tables = cls(result, result.with_name(f"accuracy_checking_details_{named[1]}.csv"))
        for path in (tables.result, tables.details):
            if not path.is_file():
                raise InputError(f"{path}: no such file")
        rows = _whole_rows(result, RESULT_COLUMNS)
        tables.done = {row[0]: row for row in rows}
        details = _whole_rows(tables.details, DETAIL_COLUMNS)
        kept = [row for row in details if _call_of(row[0]) in tables.done]
        for path, columns, found in ((result, RESULT_COLUMNS, rows), (tables.details, DETAIL_COLUMNS, kept)):
            _replace(path, MARK + _lines([columns, *found]))
        return tables

    @property
    def timestamp(self) -> str:
        """The 14 digits in the names of the tables."""
        return self.result.stem.rpartition("_")[2]

    def write(self, result: Sequence[str], details: Sequence[Sequence[str]]) -> None:
        """Append a call.

        Raises:
            OSError: when it cannot be written.

        """
        for path, rows in ((self.details, details), (self.result, [result])):
            if rows:
                with path.open("ab", buffering=0) as file:
                    append_whole(file, _lines(rows))


def _call_of(output: str) -> str:
    """Return the call of an output: `Torch.add.0` of `Torch.add.0.forward.output.0`."""
    return re.sub(r"\.(forward|backward)\.output\.\d+$", "", output)


def _lines(rows: Sequence[Sequence[str]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode("utf-8", "backslashreplace")


def _whole_rows(path: Path, columns: Sequence[str]) -> list[list[str]]:
    """Return the rows of a table below its header; an incomplete last row is left out."""
    cut_torn_line(path)
    text = read_bytes(path, MAX_OBJECT_BYTES).decode("utf-8-sig", "replace")
    try:
        rows = list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise InputError(f"{path}: {error}") from None
    if not rows or rows[0] != list(columns):
        raise InputError(f"{path}: its first line is not that of msprobe's table")
    filled = [row + [""] * (len(columns) - len(row)) for row in rows[1:]]
    return [row for row in filled if len(row) == len(columns) and row[0]]


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(content)
    temporary.replace(path)
