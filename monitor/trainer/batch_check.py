"""Looks at the batch in which an incident began, and tells the recorder which of its rows are to blame."""

from collections.abc import Callable, Sequence
from typing import Final

from trainsentry.anomaly.incident import Incident
from trainsentry.anomaly.rules.data.batch_rows import BatchRowsRule
from trainsentry.collectors.guard import Guard
from trainsentry.collectors.shared.batch_rows import InputRows
from trainsentry.monitor.recorder import messages
from trainsentry.monitor.recorder.link import RecorderLink
from trainsentry.monitor.trainer.targeted_dump import PART as DUMP
from trainsentry.monitor.trainer.targeted_dump import TargetedDump

PART: Final = "batch rows"

OTHERS: Final = (1, 2, -1)
"""Batches before and after, which show what is odd by design."""


class BatchCheck:
    """Looks once at each incident of this rank, while the batch of its step is still there.

    `rows` returns what is known of the rows of the inputs so many steps ago, `step` the step whose inputs came last.
    `dump`, where there is one, dumps a batch with odd rows at once: the next batches take its place.
    """

    def __init__(
        self,
        rows: Callable[[int], Sequence[InputRows]],
        step: Callable[[], int],
        link: RecorderLink,
        guard: Guard,
        *,
        rank: int,
    ) -> None:
        self._rows = rows
        self._step = step
        self._link = link
        self._guard = guard
        self._rank = rank
        self.dump: TargetedDump | None = None

    def look(self, incident: Incident) -> None:
        """Look at the batch of a new incident, which may have come in with it (`FROM_DATA`)."""
        if incident.rank == self._rank:
            self._guard.run(PART, self._look, incident)

    def _look(self, incident: Incident) -> None:
        steps_back = self._step() - incident.step
        rows = self._rows(steps_back)
        if not BatchRowsRule.judge(incident.step, self._rank, rows):
            return  # and the other batches need not be read
        others = [found for nearby in OTHERS for found in self._rows(steps_back + nearby)]
        found = BatchRowsRule.judge(incident.step, self._rank, rows, others)
        if found:
            self._link.send(messages.MISMATCHES, anomalies=[anomaly.to_json() for anomaly in found])
            if self.dump is not None:
                self._guard.run(DUMP, self.dump.batch, incident, steps_back)
