"""Compares the files of two runs: dumps, tables of monitored runs, or gradients from grad_probe."""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from trainsentry.anomaly.dumps.dump_comparison import EQUAL, Row, compare_dumps, renamed
from trainsentry.anomaly.dumps.tensor_difference import Difference, of_values
from trainsentry.exporters.csv.reader import rank_directories
from trainsentry.exporters.dumps.dump_reader import DumpedTensor, RankDump, read_dumps
from trainsentry.exporters.engine import Mapper, map_locally
from trainsentry.exporters.files.foreign_arrays import read_array
from trainsentry.exporters.files.foreign_files import InputError, Report, open_file
from trainsentry.exporters.short_text import counted
from trainsentry.monitor.offline.two_runs import RUN_COLUMNS, TwoRuns, compare_runs

DUMP_COLUMNS: Final = (
    "step",
    "rank",
    "call",
    "place",
    "status",
    "relative",
    "cosine",
    "max_absolute",
    "max_relative",
    "dtype",
    "shape",
    "note",
)
PROBE_COLUMNS: Final = ("step", "rank", "parameter", "similarity")

MAX_EXPANDED_BYTES: Final = 1 << 30
"""Bytes of a loaded tensor at most, if that exceeds its file's size (an expanded tensor stores its values once)."""

SIMILAR: Final = 0.97
"""Share of equal signs below which the directions of two gradients differ: msprobe's rule of thumb for a first step."""


@dataclass(frozen=True)
class Compared:
    """The result: all rows, the rows that differ (in order of cause), the first of them, and a sentence.

    Of two monitored runs, `worst` has each series' first difference alone, and `runs` what a page shows.
    """

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    worst: list[tuple[Any, ...]]
    first: tuple[Any, ...] | None
    only_in_one: int
    summary: str
    runs: TwoRuns | None = field(default=None, repr=False)

    @property
    def differ(self) -> bool:
        """Whether they differ, also in extent alone; the sentence says which."""
        return self.first is not None or self.only_in_one > 0


def compare(
    a: Path,
    b: Path,
    names: Mapping[str, str] | None = None,
    mapper: Mapper = map_locally,
    report: Report = lambda *_: None,
) -> Compared:
    """Compare two folders of the same kind; `mapper` applies the comparison to the ranks of runs.

    Unreadable files are reported and skipped. `names` maps prefixes of names in `a` to those in `b`.

    Raises:
        InputError: when a folder holds nothing comparable, or the folders are of different kinds.

    """
    kinds = [_kind(path) for path in (a, b)]
    if kinds[0] != kinds[1]:
        raise InputError(f"{a} holds {kinds[0]}, {b} holds {kinds[1]}; allowed: two of one kind")
    if kinds[0] == "a run":
        return _compare_runs(a, b, names or {}, mapper, report)
    return _compare_dumps(a, b, names or {}, report) if kinds[0] == "a dump" else _compare_probes(a, b, names or {})


def _kind(path: Path) -> str:
    if not path.is_dir():
        raise InputError(f"{path}: no such directory")
    if any(path.glob("rank*/grad_summary_*.csv")) or any(path.glob("grad_summary_*.csv")):
        return "gradients"
    try:
        rank_directories(path)
    except InputError:
        read_dumps(path)
        return "a dump"
    return "a run"


def _compare_dumps(a: Path, b: Path, names: Mapping[str, str], report: Report) -> Compared:
    ours, theirs = ({(d.step, d.rank): d for d in read_dumps(path, report)} for path in (a, b))
    if len(ours) == 1 and len(theirs) == 1:  # one dump each: compare them even if step or rank differ
        pairs = [(next(iter(ours.values())), next(iter(theirs.values())))]
    else:
        pairs = [(ours[key], theirs[key]) for key in sorted(set(ours) & set(theirs))]
    if not pairs:
        raise InputError(f"{a} and {b} have no step and rank in common")
    rows: list[tuple[Any, ...]] = []
    worst: list[tuple[Any, ...]] = []
    only = len(ours) + len(theirs) - 2 * len(pairs)  # dumps that only one folder has
    for one, other in pairs:
        for row in compare_dumps(one, other, names, _Values(one, other)):
            only += row.status in {"missing", "extra"}
            rows.append(_cells(one, row))
            if row.differs:
                worst.append(rows[-1])
    first = worst[0] if worst else None
    equal = sum(row[4] == EQUAL for row in rows)
    text = (
        f"they first differ at step {first[0]}, rank {first[1]}, {first[2]} ({first[3]}): {_why(first)}"
        if first is not None
        else f"they do not differ{' in what both have' if only else ''}"
    )
    counts = f"{counted(equal, 'tensor')} equal within rounding, {len(worst)} different, {only} in only one of the two"
    summary = f"{text}; {counts}"
    return Compared(DUMP_COLUMNS, rows, worst, first, only, summary)


def _why(row: tuple[Any, ...]) -> str:
    return str(row[-1]) if row[-1] else f"relative error {row[5]:.3g}"


def _cells(dump: RankDump, row: Row) -> tuple[Any, ...]:
    d = row.difference or Difference(math.nan)
    numbers = (d.relative, d.cosine, d.max_absolute, d.max_relative)
    return (dump.step, dump.rank, row.call, row.place, row.status, *numbers, row.dtype, row.shape, d.note)


class _Values:
    """Compares the files of two tensors."""

    def __init__(self, a: RankDump, b: RankDump) -> None:
        self.a, self.b = a, b

    def __call__(self, a: DumpedTensor, b: DumpedTensor) -> Difference | None:
        paths = self.a.path_of(a), self.b.path_of(b)
        if paths[0] is None or paths[1] is None:
            return None
        arrays = [load_array(path) for path in paths if path is not None]
        try:
            return of_values(*arrays)
        except MemoryError:
            raise InputError(f"{paths[0]}: does not fit in memory") from None


def load_array(path: Path) -> Any:
    """Return a dumped tensor as an array, without running code in the file.

    Raises:
        InputError: when the file holds no tensor.
        OSError: when it cannot be read.

    """
    if path.suffix == ".npy":
        return read_array(path)
    with open_file(path) as file:
        limit = max(os.fstat(file.fileno()).st_size, MAX_EXPANDED_BYTES)
    try:
        return _load(path, limit)
    except Exception as error:
        first = str(error).partition("\n")[0] or type(error).__name__
        raise InputError(f"{path}: cannot be loaded as a tensor: {first}") from error


def _load(path: Path, limit: int) -> Any:
    from trainsentry.collectors.torch.saving import load_tensor

    tensor = load_tensor(path).resolve_conj().resolve_neg()
    if tensor.numel() * tensor.element_size() > limit:
        raise InputError(f"claims {tensor.numel()} elements, too many for its size")
    return (tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor).numpy()


def _compare_runs(a: Path, b: Path, names: Mapping[str, str], mapper: Mapper, report: Report) -> Compared:
    found = compare_runs(a, b, names, mapper, report)
    firsts = [series.row for series in found.series]
    first = firsts[0] if firsts else None
    return Compared(RUN_COLUMNS, found.rows, firsts, first, found.only, found.sentence, found)


def _signs(path: Path) -> list[Path]:
    """Return the files of gradient signs, sorted by step and name."""
    found = (file for file in path.glob("**/step*/*.npy") if _STEP.fullmatch(file.parent.name))
    return sorted(found, key=lambda p: (int(p.parent.name[4:]), p.name))


_STEP: Final = re.compile(r"step\d{1,16}", re.ASCII)


def _compare_probes(a: Path, b: Path, names: Mapping[str, str]) -> Compared:
    """Compare the directions of gradients: the share of elements whose signs are equal."""
    rows = []
    signs, others = _signs(a), _signs(b)
    seen = {file.relative_to(a) for file in signs}
    only = sum(file.relative_to(b) not in seen for file in others) if not names else 0
    for file in signs:
        path = file.relative_to(a)
        name = renamed(file.stem, names)
        other = b / path.with_name(f"{name}.npy")
        if not other.is_file():
            only += 1
            continue
        x, y = load_array(file), load_array(other)
        same = float(np.mean(x == y)) if x.shape == y.shape and x.size else math.nan
        rank = path.parts[0] if path.parts[0].startswith("rank") else "rank0"
        rows.append((int(file.parent.name[4:]), rank, file.stem, same))
    if not rows:
        raise InputError(f"{a} and {b} have no gradient signs in common (grad_level L1 or L2 writes them)")
    worst = [row for row in rows if not row[3] >= SIMILAR]
    first = worst[0] if worst else None
    text = (
        f"they first differ in direction at step {first[0]}, {first[2]}: {first[3]:.1%} of the signs are equal"
        if first is not None
        else "they do not differ in direction"
    )
    lowest = min(row[3] for row in rows)
    return Compared(PROBE_COLUMNS, rows, worst, first, only, f"{text}; the lowest similarity is {lowest:.4f}")
