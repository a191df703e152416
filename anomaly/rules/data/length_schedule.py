"""Inputs of the model that grow by a schedule: a curriculum of longer and longer sequences, or of larger images."""

from dataclasses import dataclass
from typing import Final

from trainsentry.anomaly.series_arrays import SeriesArrays, rows_where
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import Series

GROWS: Final = 1.5
"""Factor above every length before that begins a stage; lengths of what is read vary by less from batch to batch."""

STAGE: Final = 16
"""Steps for which a shape must have been the same before: batches of like lengths come in shorter stretches."""


@dataclass(slots=True)
class _Input:
    """The shape of an input, the step since which it is that, the longest of each dimension, and its stages.

    `is_stage`: the present shape began as one that is longer than all before; `stages` of those have lasted.
    """

    shape: tuple[int, ...]
    since: int
    longest: tuple[int, ...]
    is_stage: bool = False
    stages: int = 0


class LengthSchedule:
    """Follows the shapes of the model's inputs.

    The first growth may be a fault, as where sequences are cut no more. One that follows it is the loop's own, if the
    first has lasted: a single batch may be longer.
    """

    def __init__(self, arrays: SeriesArrays) -> None:
        self._layouts = arrays.table.layouts
        self._is_input = arrays.series.column(bool, of=_is_input)
        self._inputs: dict[int, _Input] = {}

    def grows_again(self, record: StepRecord) -> bool:
        """Return whether a record begins a stage of longer inputs, which is not the first such stage."""
        again = False
        for row in rows_where(self._is_input.values[record.where]).tolist():
            shape = self._layouts[int(record.layouts[row])].shape
            known = self._inputs.get(int(record.ids[row]))
            if known is None or len(known.shape) != len(shape) or record.step < known.since:
                self._inputs[int(record.ids[row])] = _Input(shape, record.step, shape)
            elif known.shape != shape:
                has_lasted = record.step - known.since >= STAGE
                longer = any(now > GROWS * before for now, before in zip(shape, known.longest, strict=True))
                known.stages += known.is_stage and has_lasted
                known.is_stage = longer and has_lasted
                again |= known.is_stage and known.stages > 0
                known.shape, known.since = shape, record.step
                known.longest = tuple(map(max, shape, known.longest))
        return again


def _is_input(series: Series) -> bool:
    return series.is_model_input and not series.micro_step
