"""Makes the buckets again that an earlier start of a run left open, from the rows that it wrote."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from trainsentry.exporters.csv.format import SCALARS, TableFile
from trainsentry.exporters.csv.level_files import levels_of, next_step, valid_until
from trainsentry.exporters.csv.levels import LeveledTable, LevelRows, tail_of
from trainsentry.exporters.csv.part_rows import rows_of_parts
from trainsentry.exporters.csv.table_parts import parts_of
from trainsentry.exporters.csv.table_rows import RowKeys, TableRows, by_step

CAUGHT_UP_BYTES: Final = 1 << 26
"""Bytes of rows that a start reads at most for a level of a table: two or three seconds. If there are more, as in a run
that an older version began, the table has no further levels."""


def catch_up(table: LeveledTable, files: Sequence[TableFile], start_step: int, restart: int) -> bool:
    """Take in what `files` hold after the last whole bucket of each level; return whether it is little enough to read.

    Of starts before `restart`, steps from `start_step` on do not count. Taking a row in twice changes nothing.
    """
    levels = levels_of(files)
    table.begun = sum(1 for of_level in levels if of_level)
    until = {s: end if s >= restart else min(end, start_step) for s, end in valid_until(files).items()}
    for level in reversed(range(len(levels))):  # a lower level passes rows on, which must come after these
        bounds = {file: until.get(file.restart, start_step) for file in levels[level]}
        since = max((next_step(file, bound) for file, bound in bounds.items()), default=0)
        if not _take(table, level, levels[level - 1] if level else files, since, until, start_step):
            return False
    return True


def _take(
    table: LeveledTable, level: int, files: Sequence[TableFile], since: int, until: dict[int, int], start_step: int
) -> bool:
    """Take in the rows of the level below from step `since` on; return whether they are few enough."""
    keys, cost = RowKeys(), 0
    for file in sorted(files, key=lambda f: (f.restart, f.first)):
        end = until.get(file.restart, start_step)
        parts = parts_of([file], range(since, end), _nothing) if end > since else []
        cost += sum(part.cost for part in parts)
        if cost > CAUGHT_UP_BYTES:
            return False
        for piece, at in rows_of_parts(parts, keys, table.columns, _nothing):
            for rows in by_step(piece, at):
                if not since <= rows.step < end:
                    continue
                taken = _of_table(table, rows, keys)
                if table.is_too_wide:
                    return False
                if level:
                    table.take_at(level, taken)
                else:
                    table.take(taken)
    return True


def _of_table(table: LeveledTable, rows: TableRows, keys: RowKeys) -> LevelRows:
    """Return rows of a file by the places and in the columns of a table."""
    slots = []
    for key_id, layout in zip(rows.keys.tolist(), rows.layouts.tolist(), strict=True):
        slots.append(table.slot(keys.keys[key_id]))
        table.tails[slots[-1]] = "" if table.name == SCALARS else tail_of(table.name, *keys.layouts[layout])
    at = [rows.numbers.index(name) if name in rows.numbers else None for name in table.columns]
    values = [np.full(len(rows), np.nan) if i is None else rows.values[:, i] for i in at]
    return LevelRows(rows.step, np.asarray(slots, np.intp), np.stack(values, axis=1))


def _nothing(path: Path, line: int, message: str) -> None:
    """Take no notice of a line that cannot be read: the table's own readers name it."""
