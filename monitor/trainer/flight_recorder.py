"""Shows the flight recorder's records: all as a table, and the newest values by name."""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from trainsentry.collectors.histogram import HISTOGRAM
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import COMMUNICATION_CALL, VALUE_NAMES, Series, SeriesTable
from trainsentry.collectors.statistics import STATISTICS, VALUE

if TYPE_CHECKING:
    import pandas as pd


def table_of_records(
    records: Sequence[StepRecord], table: SeriesTable, statistics: tuple[str, ...], last: int | None
) -> "pd.DataFrame":
    """Return records as a table with a row per step and series.

    Columns: step, rank, micro_step, order, name, quantity, index, the statistics, and `value` (the ratio
    of an update, the alignment of a moment, or the value of a scalar).
    """
    import pandas as pd

    steps = sorted({r.step for r in records})
    wanted = set(steps if last is None else steps[-last:] if last > 0 else [])
    rows: list[dict[str, Any]] = []
    for record in records:
        if record.step not in wanted:
            continue
        histograms = record.histograms.texts() if record.histograms is not None else None
        for row, series_id in enumerate(record.ids.tolist()):
            series = table.series[series_id]
            if series.quantity == COMMUNICATION_CALL:
                continue
            numbers = record.values[row]
            rows.append(
                {
                    "step": record.step,
                    "rank": record.rank,
                    "micro_step": series.micro_step,
                    "order": record.first_order + row,
                    "name": series.name,
                    "quantity": series.quantity,
                    "index": series.index,
                    **{name: numbers[STATISTICS.index(name)] for name in statistics},
                    **({HISTOGRAM: histograms[row]} if histograms is not None else {}),
                    "value": numbers[VALUE] if series.scalar or series.quantity in VALUE_NAMES else math.nan,
                }
            )
    lead = ["step", "rank", "micro_step", "order", "name", "quantity", "index"]
    counted = [HISTOGRAM] if any(HISTOGRAM in row for row in rows) else []
    frame: pd.DataFrame = pd.DataFrame(rows, columns=[*lead, *statistics, *counted, "value"])
    return frame


def metrics_of(
    records: Sequence[StepRecord], table: SeriesTable, statistics: tuple[str, ...], quantity: str
) -> dict[str, dict[str, float]]:
    """Return the newest step's statistics of a quantity; of several micro-steps, the last one's.

    Where models of a list share a name, all names are preceded by the model's number: `0.output.0`, `1.output.0`.
    """
    ids = dict(table.of_quantity(quantity))
    names = _distinct_names(ids.values())
    found: dict[str, dict[str, float]] = {}
    newest: int | None = None
    for record in reversed(records):
        if newest is not None and record.step != newest:
            break
        # The newest record comes first here: an earlier part of the step must not replace a later one's values.
        part: dict[str, dict[str, float]] = {}
        for row, series_id in enumerate(record.ids.tolist()):
            if series_id in ids:
                newest = record.step
                part[names[ids[series_id]]] = _values(record, row, statistics, quantity, ids[series_id].scalar)
        found = {**part, **found}
    return found


def _distinct_names(found: Iterable[Series]) -> dict[Series, str]:
    """Return the series' names; where two models share one, all are preceded by their model's number."""
    listed = list(found)
    stages: dict[str, int] = {}
    shared = any(stages.setdefault(series.name, series.vpp_stage) != series.vpp_stage for series in listed)
    return {series: f"{series.vpp_stage}.{series.name}" if shared else series.name for series in listed}


def _values(
    record: StepRecord,
    row: int,
    statistics: tuple[str, ...],
    quantity: str,
    scalar: bool,
) -> dict[str, float]:
    numbers = record.values[row].tolist()
    if scalar:
        return {"value": numbers[VALUE]}
    found = {name: numbers[STATISTICS.index(name)] for name in statistics}
    return {**found, VALUE_NAMES[quantity]: numbers[VALUE]} if quantity in VALUE_NAMES else found
