"""Turns a step record into the rows that msprobe's monitor would write: its prefixes, names and numbers."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Final

from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import (
    ACTIVATION_GRAD_INPUT,
    ACTIVATION_GRAD_OUTPUT,
    ACTIVATION_INPUT,
    ACTIVATION_OUTPUT,
    ACTIVATION_QUANTITIES,
    COMMUNICATION_INPUT,
    COMMUNICATION_OUTPUT,
    GRADIENT,
    GRADIENT_UNREDUCED,
    MOMENT_DIRECTION,
    PARAMETER,
    PARAMETER_UPDATED,
    Layout,
    Series,
    SeriesTable,
)
from trainsentry.collectors.statistics import INFS, MAX, MEAN, MIN, NANS, NORM, ZEROS

OTHER: Final = "other"

TASKS: Final = {
    ACTIVATION_INPUT: ("actv", "actv"),
    ACTIVATION_OUTPUT: ("actv", "actv"),
    ACTIVATION_GRAD_INPUT: ("actv_grad", "actv_grad"),
    ACTIVATION_GRAD_OUTPUT: ("actv_grad", "actv_grad"),
    GRADIENT_UNREDUCED: ("grad_unreduced", "acc_grad"),
    GRADIENT: ("grad_reduced", "post_grad"),
    PARAMETER: ("param_origin", "param_origin"),
    PARAMETER_UPDATED: ("param_updated", "param_updated"),
    **dict.fromkeys(("exp_avg", "moment1", "moments1"), ("exp_avg", "exp_avg")),
    **dict.fromkeys(("exp_avg_sq", "moment2", "moments2"), ("exp_avg_sq", "exp_avg_sq")),
    MOMENT_DIRECTION: (OTHER, "mg_direction"),
}
"""The prefix of msprobe's file and the last part of its tag, for each quantity that it has too."""

NUMBERS: Final = ("norm", "min", "max", "mean", "zeros", "nans", "id")
TEXTS: Final = ("shape", "dtype")
OPS: Final = (*NUMBERS, *TEXTS)
"""msprobe's statistics. `id` is the value of a tensor without dimensions."""

_PLACES: Final = {"norm": NORM, "min": MIN, "max": MAX, "mean": MEAN, "zeros": ZEROS, "nans": NANS}

_SQUASHED: Final = tuple(
    re.compile(rf"^.*\.({part}.*)", re.DOTALL) for part in (r"layers?\.", r"embeddings?\.", "final", "output", "norm")
)


@dataclass(frozen=True, slots=True)
class MsprobeRow:
    """One row: `prefix` is that of its file, `task` the end of its tag. `micro_step` is None in files without one."""

    prefix: str
    task: str
    vpp_stage: int
    name: str
    micro_step: int | None
    numbers: tuple[float, ...]
    layout: Layout

    def tag(self, rank: int) -> str:
        """Return msprobe's tag: `<chunk>:<name>[:<micro-step>]/rank<r>/<task>`."""
        micro = "" if self.micro_step is None else f":{self.micro_step}"
        return f"{self.vpp_stage}:{self.name}{micro}/rank{rank}/{self.task}"

    def value(self, op: str) -> float:
        """Return a statistic as msprobe computes it: not finite as soon as one element is NaN, or the norm at an Inf.

        Our minimum, maximum and mean are those of the finite elements; with an Inf they stay so here.
        """
        if op == "id":
            return self.numbers[MEAN] if not self.layout.shape else math.nan
        if op in {"norm", "min", "max", "mean"} and self.numbers[NANS] > 0:
            return math.nan
        return math.inf if op == "norm" and self.numbers[INFS] > 0 else self.numbers[_PLACES[op]]


@dataclass(frozen=True)
class RowChoice:
    """Which rows are written. Patterns are shell-style, over `<chunk>:<name>`.

    `squash` shortens names as msprobe's `squash_name` does; `micro_steps` keeps every micro-step of gradients before
    reduction; `inputs` keeps what collectives get, too.
    """

    activations: tuple[str, ...] = ("*",)
    parameters: tuple[str, ...] = ("*",)
    squash: bool = False
    micro_steps: bool = False
    inputs: bool = False


def squashed(name: str) -> str:
    """Return a name from its layer on, as msprobe shortens names.

    >>> squashed("module.decoder.layers.0.fc.weight"), squashed("fc.weight")
    ('layers.0.fc.weight', 'fc.weight')
    """
    return next((found[1] for pattern in _SQUASHED if (found := pattern.match(name)) is not None), name)


class MsprobeRows:
    """Returns the rows of each record in msprobe's terms; the names of series are worked out once."""

    def __init__(self, table: SeriesTable, chosen: RowChoice) -> None:
        self.table = table
        self.chosen = chosen
        self._known: dict[int, MsprobeRow | None] = {}
        self._tensors: Counter[tuple[str, str, int]] = Counter()
        self._looked_at = 0

    def of(self, record: StepRecord) -> list[MsprobeRow]:
        """Return a record's rows in its order; those of communication come last, one for each operation."""
        self._look_at_new_series()
        found: dict[tuple[str, str, int, str, int | None], MsprobeRow] = {}
        calls: dict[tuple[str, str], list[MsprobeRow]] = defaultdict(list)
        rows = zip(record.ids.tolist(), record.layouts.tolist(), record.values.tolist(), strict=True)
        for series_id, layout, numbers in rows:
            if series_id not in self._known:
                self._known[series_id] = self._named(self.table.series[series_id])
            known = self._known[series_id]
            if known is None:
                continue
            row = replace(known, numbers=tuple(numbers), layout=self.table.layouts[layout])
            if row.task == "mg_direction":
                row = replace(row, layout=_NO_LAYOUT)  # the share is one number
            if row.task in {COMMUNICATION_INPUT, COMMUNICATION_OUTPUT}:
                calls[row.name, row.task].append(row)
            else:  # a later micro-step replaces an earlier one, in tables that have no column for it
                found[row.prefix, row.task, row.vpp_stage, row.name, row.micro_step] = row
        return [*found.values(), *map(_aggregated, calls.values())]

    def _look_at_new_series(self) -> None:
        """Count the tensors on each side of a call: msprobe numbers them only where there are several."""
        for series in self.table.series[self._looked_at :]:
            if series.quantity in ACTIVATION_QUANTITIES and series.micro_step == 0:
                self._tensors[series.module, series.quantity, series.vpp_stage] += 1
        if self._looked_at != len(self.table.series):
            self._known = {i: row for i, row in self._known.items() if row is None or row.prefix not in _ACTIVATIONS}
        self._looked_at = len(self.table.series)

    def _named(self, series: Series) -> MsprobeRow | None:
        """Return a series' row without its numbers; None where msprobe has none, or it is not chosen."""
        if series.quantity in {COMMUNICATION_INPUT, COMMUNICATION_OUTPUT} and not series.scalar:
            return self._call(series)
        if series.scalar or series.quantity not in TASKS:
            return None
        prefix, task = TASKS[series.quantity]
        patterns = self.chosen.parameters
        micro: int | None = None
        name = squashed(series.name) if self.chosen.squash else series.name
        if series.quantity in ACTIVATION_QUANTITIES:
            patterns, micro, name = self.chosen.activations, series.micro_step, self._activation(series)
        elif series.quantity == GRADIENT_UNREDUCED and self.chosen.micro_steps:
            micro = series.micro_step
        if not any(fnmatchcase(f"{series.vpp_stage}:{name}", pattern) for pattern in patterns):
            return None
        return MsprobeRow(prefix, task, series.vpp_stage, name, micro, (), _NO_LAYOUT)

    def _activation(self, series: Series) -> str:
        module = squashed(series.module) if self.chosen.squash else series.module
        side = _side(series)
        quantities = _INPUTS if side == "input" else _OUTPUTS
        several = max(self._tensors[series.module, quantity, series.vpp_stage] for quantity in quantities) > 1
        index = series.index if series.index.isdigit() else "0" if not series.index else series.index.replace(".", "_")
        return f"{module}.{side}" + (f"_{index}" if several else "")

    def _call(self, series: Series) -> MsprobeRow | None:
        is_input = series.quantity == COMMUNICATION_INPUT
        if is_input and not self.chosen.inputs:
            return None
        op = series.index.partition("|")[0]
        return MsprobeRow(OTHER, series.quantity, 0, f"{op}.{'pre' if is_input else 'post'}", None, (), _NO_LAYOUT)


_NO_LAYOUT: Final = Layout((), "float32", 1)
_INPUTS: Final = frozenset({ACTIVATION_INPUT, ACTIVATION_GRAD_INPUT})
_OUTPUTS: Final = frozenset({ACTIVATION_OUTPUT, ACTIVATION_GRAD_OUTPUT})
_ACTIVATIONS: Final = frozenset({"actv", "actv_grad"})


def _side(series: Series) -> str:
    return "input" if series.quantity in _INPUTS else "output"


def _aggregated(rows: Sequence[MsprobeRow]) -> MsprobeRow:
    """Return one row of all calls of an operation: extremes, the sum of norms and of NaN, the average of the rest."""
    columns = list(zip(*(row.numbers for row in rows), strict=True))
    numbers = [0.0] * len(columns)
    for place, combine in ((MIN, min), (MAX, max), (NORM, sum), (NANS, sum), (INFS, sum)):
        numbers[place] = combine(columns[place])
    for place in (MEAN, ZEROS):
        numbers[place] = sum(columns[place]) / len(rows)
    return replace(rows[0], numbers=tuple(numbers))


def texts_of(row: MsprobeRow, ops: Sequence[str], digits: int, framework: str) -> Iterator[str]:
    """Yield the text of each statistic of a row, rounded to `digits` decimal places."""
    for op in ops:
        if op == "shape":
            shape = str(list(row.layout.shape))
            yield f'"{shape}"' if "," in shape else shape
        elif op == "dtype":
            yield dtype_name(row.layout.dtype, framework)
        elif op == "nans":
            yield str(int(row.numbers[NANS]))
        else:
            yield repr(round(row.value(op), digits))


def dtype_name(dtype: str, framework: str) -> str:
    """Return a dtype as the framework prints it.

    >>> dtype_name("float32", "pytorch"), dtype_name("float32", "mindspore")
    ('torch.float32', 'Float32')
    """
    return f"torch.{dtype}" if framework == "pytorch" else dtype[:1].upper() + dtype[1:]
