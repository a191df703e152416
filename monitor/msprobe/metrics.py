"""Statistics in memory under msprobe's tags, as its calls `generate_…_metrics` return them."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from trainsentry.collectors.backend import Framework
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import Series, SeriesTable
from trainsentry.collectors.shared.host_rows import PendingRows
from trainsentry.exporters.msprobe.rows import TEXTS, MsprobeRows, RowChoice, dtype_name
from trainsentry.monitor.trainer.step_loop import StepLoop

Metrics = dict[str, dict[str, Any]]
"""`{tag: {op: value}}`; numbers are NumPy's, so that `.item()` works on them."""


class MsprobeMetrics:
    """Returns the statistics of the current step, or of the newest one that has them."""

    def __init__(
        self, loop: StepLoop, framework: Framework, ops: Sequence[str], *, squash: bool, name: str, eps: float
    ) -> None:
        self.loop = loop
        self.framework = framework
        self.ops = tuple(ops)
        self.name = name
        self.eps = eps
        self._chosen = RowChoice(squash=squash, micro_steps=False)
        self._rows = MsprobeRows(loop.table, self._chosen)

    def of(self, prefixes: Collection[str]) -> list[Metrics]:
        """Return the statistics of each of msprobe's prefixes (`actv`, `grad_unreduced`, …)."""
        found: list[Metrics] = [{} for _ in prefixes]
        for place, prefix in enumerate(prefixes):
            for record in [self._open_step(), *reversed(self.loop.outbox.records)]:
                found[place] = self._named(record, self.loop.table, prefix)
                if found[place]:
                    break
        return found

    def gradients(self) -> Metrics:
        """Return the statistics of the gradients that parameters hold now; {} when they hold none."""
        return self.measured(self.loop.watch.current_gradients())

    def measured(self, tensors: Sequence[tuple[Series, Any]]) -> Metrics:
        """Return the statistics of tensors now."""
        table = SeriesTable()
        rows = self.framework.measure(table, tensors, self.eps)
        return self._named(self._record(rows), table, "grad_reduced")

    def _open_step(self) -> StepRecord:
        """Return the rows of the step so far; waits for a device that is still computing them."""
        return self._record(self.loop.watch.rows.peek())

    def _record(self, rows: PendingRows) -> StepRecord:
        rows.wait()
        return StepRecord(self.loop.step, self.loop.rank, *rows.resolve())

    def _named(self, record: StepRecord, table: SeriesTable, prefix: str) -> Metrics:
        rows = self._rows if table is self.loop.table else MsprobeRows(table, self._chosen)
        return {
            row.tag(self.loop.rank): {op: self._value(row, op) for op in self.ops}
            for row in rows.of(record)
            if row.prefix == prefix
        }

    def _value(self, row: Any, op: str) -> Any:
        if op in TEXTS:
            return list(row.layout.shape) if op == "shape" else dtype_name(row.layout.dtype, self.name)
        return np.float64(row.value(op))
