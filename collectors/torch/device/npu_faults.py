"""Counts what torch_npu's own checks of the hardware report: silent data corruption (NPU_ASD_ENABLE)."""

import logging
import threading
from collections.abc import Mapping
from typing import Final

SILENT_CHECK: Final = "torch_npu.silent_check"
"""The logger of torch_npu's silent-data check: a warning is a finding, lower levels are its own progress."""


class NpuFaults(logging.Handler):
    """Listens to the warnings of torch_npu's silent-data check from the first call of `counts` on.

    The check itself is the user's choice; its hooks, its thread and its thresholds stay as they are.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._count = 0
        self._count_lock = threading.Lock()
        self._listens = False

    def emit(self, record: logging.LogRecord) -> None:
        """Count a warning; torch_npu logs from a thread of its own."""
        with self._count_lock:
            self._count += 1

    def counts(self) -> Mapping[str, int]:
        """Return the number of findings by kind since the first call."""
        if not self._listens:
            logging.getLogger(SILENT_CHECK).addHandler(self)
            self._listens = True
        with self._count_lock:
            return {"silent_check": self._count}

    def forget(self) -> None:
        """Stop listening, and start again from zero at the next call of `counts`."""
        logging.getLogger(SILENT_CHECK).removeHandler(self)
        self._listens, self._count = False, 0
