"""Sends a recorder's records and messages up the tree; keeps them, up to a limit, until its parent is connected."""

import json
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import SeriesTable
from trainsentry.monitor.recorder.ranks import framing
from trainsentry.monitor.recorder.ranks.network import Network
from trainsentry.monitor.recorder.ranks.peer_messages import DEFINE

SERIES_PER_MESSAGE: Final = 5_000
"""Series defined in one message, about 1 MB; names may be ten times as long."""


class Uplink:
    """Sends records and messages in order; defines all series and layouts again for each new parent.

    `greet` is called after a new parent has got the kept messages, so that a request does not overtake them.
    """

    def __init__(self, net: Network, greet: Callable[[], None]) -> None:
        self.network = net
        self._greet = greet
        self._sent = (0, 0)
        self._waiting: deque[tuple[SeriesTable, StepRecord] | dict[str, Any]] = deque()
        self._waiting_bytes = 0
        self._connected = False

    @property
    def waits(self) -> bool:
        """Whether messages are kept."""
        return bool(self._waiting)

    def note_connection(self) -> None:
        """Send the kept messages to a new parent; drop them if the parent is lost."""
        connected = self.network.parent is not None
        if connected and not self._connected:
            self._connected, self._sent = True, (0, 0)
            waiting, self._waiting, self._waiting_bytes = self._waiting, deque(), 0
            for entry in waiting:
                if isinstance(entry, dict):
                    self.message(entry)
                else:
                    self.record(*entry)
            self._greet()
        elif self.network.lost_parent:
            self._waiting.clear()
        self._connected = connected

    def record(self, table: SeriesTable, record: StepRecord) -> None:
        """Send a record whose series and layouts are those of `table`."""
        self.note_connection()  # kept messages go first
        if self.network.parent is None:
            self._keep((table, record), record.nbytes)
            return
        self._define(table)
        for part in record.parts(framing.MAX_MESSAGE_BYTES[framing.RECORD]):
            self.network.send_up(framing.RECORD, b"".join(part.encode()))

    def _define(self, table: SeriesTable) -> None:
        """Define the series and layouts that the parent does not know yet."""
        series, layouts = self._sent
        while len(table.series) > series or len(table.layouts) > layouts:
            self.network.tell_parent({"type": DEFINE, **table.definitions(series, layouts, SERIES_PER_MESSAGE)})
            series = min(series + SERIES_PER_MESSAGE, len(table.series))
            layouts = min(layouts + SERIES_PER_MESSAGE, len(table.layouts))
        self._sent = (series, layouts)

    def message(self, message: dict[str, Any]) -> None:
        """Send a message."""
        self.note_connection()
        if self.network.parent is None:
            self._keep(message, len(json.dumps(message)))
        else:
            self.network.tell_parent(message)

    def _keep(self, entry: tuple[SeriesTable, StepRecord] | dict[str, Any], size: int) -> None:
        """Keep an entry until the parent is connected; drop it if the parent is lost or too much is kept."""
        if not self.network.lost_parent and self._waiting_bytes + size <= framing.MAX_UNSENT_BYTES:
            self._waiting.append(entry)
            self._waiting_bytes += size
