"""Writes tensors to files in a thread, from copies in host memory, while training goes on."""

import threading
from collections import deque
from pathlib import Path
from typing import Final

from torch import Tensor

from trainsentry.collectors.torch.device.copies import HostCopy
from trainsentry.collectors.torch.device.registry import device_of
from trainsentry.collectors.torch.rows.local_tensor import local
from trainsentry.collectors.torch.saving import save_again, save_tensor, stored_bytes

MOST_BYTES: Final = 2**30
"""Bytes of copies that may wait to be written; then the training waits, as a large dump would fill host memory."""


class TensorFiles:
    """Copies tensors to pinned memory without waiting for the device, and writes the copies in order.

    Raises the first error of writing at the next call, and drops what is waiting then.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self.most_waiting = 0
        self._waiting: deque[tuple[HostCopy | Path, Path, int]] = deque()
        self._bytes = 0
        self._fault: BaseException | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def write(self, tensor: Tensor, path: Path) -> None:
        """Begin to write a tensor's part on this rank as it is now; waits while too many bytes are to be written.

        Raises:
            OSError: when an earlier file could not be written.

        """
        size = stored_bytes(tensor)
        with self._changed:
            self._changed.wait_for(lambda: self._fault or not self._bytes or self._bytes + size <= self.most_bytes)
        part = local(tensor)
        self._submit(device_of(part).copy_to_host(part.contiguous()), path, size)

    def link(self, known: Path, path: Path) -> None:
        """Let `path` be the same file as `known`, once that is written."""
        self._submit(known, path, 0)

    def drain(self) -> None:
        """Wait until every file is written.

        Raises:
            OSError: when one could not be written.

        """
        with self._changed:
            self._changed.wait_for(lambda: self._fault or not self._waiting)
            self._raise_fault()

    def _submit(self, source: HostCopy | Path, path: Path, size: int) -> None:
        with self._changed:
            self._raise_fault()
            self._waiting.append((source, path, size))
            self._bytes += size
            self.most_waiting = max(self.most_waiting, self._bytes)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="trainsentry-dump", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _raise_fault(self) -> None:
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting), timeout=IDLE_SECONDS)
                if not self._waiting:
                    self._thread = None
                    return
                source, path, size = self._waiting[0]
            fault = _written(source, path)
            with self._changed:
                if fault is None:
                    self._waiting.popleft()
                    self._bytes -= size
                else:
                    self._fault = fault
                    self._waiting.clear()
                    self._bytes = 0
                self._changed.notify_all()


IDLE_SECONDS: Final = 5.0
"""The thread ends when nothing was to be written for so long, and begins anew when something is."""


def _written(source: HostCopy | Path, path: Path) -> BaseException | None:
    """Write or link a file; return the error if that fails."""
    try:
        if isinstance(source, HostCopy):
            source.wait()
            save_tensor(source.host, path)
        else:
            save_again(source, path)
    except Exception as error:  # noqa: BLE001 - it is raised where the next tensor is written
        return error
    return None
