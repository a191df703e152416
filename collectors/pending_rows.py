"""The rows of a step on their way to the host."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass
class PendingRows:
    """Rows on their way to the host; on CPU they are there at once. `kept` masks rows that were read anew later.

    A copy is the positions of its rows, what returns them once its event has come, and that event (or None).
    """

    ids: npt.NDArray[np.int32]
    layouts: npt.NDArray[np.int32]
    values: npt.NDArray[np.float64]
    kept: npt.NDArray[np.bool_]
    copies: list[tuple[npt.NDArray[np.intp], Callable[[], npt.NDArray[Any]], Any]]
    aliases: list[tuple[int, int]]

    def ready(self) -> bool:
        """Whether every copy has arrived; asks the device without waiting for it."""
        return all(event is None or event.query() for _, _, event in self.copies)

    def wait(self) -> None:
        """Wait until every copy has arrived."""
        for _, _, event in self.copies:
            if event is not None:
                event.synchronize()

    def resolve(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.float64]]:
        """Return ids, layouts and values (float64 of shape (n, COLUMNS)); call once the copies are ready."""
        for positions, read, _ in self.copies:
            self.values[positions] = read()
        for position, source in self.aliases:
            self.values[position] = self.values[source]
        if self.kept.all():
            return self.ids, self.layouts, self.values
        return self.ids[self.kept], self.layouts[self.kept], self.values[self.kept]
