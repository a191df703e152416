"""A bounded ring of messages in memory shared by two processes: one writes, one reads.

The memory has no name in any file system (a memfd, or a file unlinked before it is used), so nothing remains whichever
process dies first, and the size of /dev/shm does not matter.
"""

import mmap
import os
import struct
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np

_HEADER: Final = 128  # head and tail are a cache line apart
_FRAME: Final = struct.Struct("=II")
_NEWEST: Final = struct.Struct("=qd")
_NEWEST_AT: Final = 16  # in the writer's cache line


class Ring:
    """Messages (kind, bytes) in the order they were written.

    `head` and `tail` count all bytes ever written and ever freed. Only one side changes each, in one aligned store. The
    reader frees messages with `commit`, so a successor finds the messages that it had not finished.

    All pages are mapped at the start; otherwise the process's memory would seem to grow with use.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor = descriptor
        self.size = size
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        self._map = mmap.mmap(descriptor, _HEADER + size, flags)
        self._counters = np.frombuffer(self._map, np.uint64, _HEADER // 8)
        self._read_to = self.tail

    @classmethod
    def create(cls, size: int) -> "Ring":
        """Create a ring of `size` bytes, a multiple of 8."""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("trainsentry-ring")
        else:  # macOS and old kernels
            descriptor, path = tempfile.mkstemp(prefix="trainsentry-ring-")
            Path(path).unlink()
        os.ftruncate(descriptor, _HEADER + size)
        ring = cls(descriptor, size)
        ring.note_newest(-1, 0.0)
        return ring

    @property
    def head(self) -> int:
        """Bytes ever written."""
        return int(self._counters[0])

    @property
    def tail(self) -> int:
        """Bytes ever freed."""
        return int(self._counters[8])

    @property
    def newest(self) -> tuple[int, float]:
        """Step and time (seconds since the epoch) of the newest record, written or dropped; may lag slightly."""
        step, time = _NEWEST.unpack_from(self._map, _NEWEST_AT)
        return step, time

    def note_newest(self, step: int, time: float) -> None:
        """Publish the writer's newest step and time, independent of the messages."""
        _NEWEST.pack_into(self._map, _NEWEST_AT, step, time)

    @property
    def used(self) -> int:
        """Bytes of messages that are not freed yet."""
        return self.head - self.tail

    @property
    def largest_message(self) -> int:
        """Bytes of a message at most: a quarter of the ring, so that no message needs an empty ring."""
        return self.size // 4

    def write(self, kind: int, chunks: Sequence[bytes]) -> bool:
        """Append a message; return False when there is no room now.

        Raises:
            ValueError: when the message is larger than `largest_message`; writers split larger ones.

        """
        length = sum(map(len, chunks))
        if length > self.largest_message:
            raise ValueError(f"a message of {length} bytes; the ring takes at most {self.largest_message}")
        head = self.head
        if head + _padded(length) - self.tail > self.size:
            return False
        self._put(head, b"".join((_FRAME.pack(length, kind), *chunks)))
        self._counters[0] = head + _padded(length)
        return True

    def read(self, up_to: int) -> tuple[int, bytes] | None:
        """Return the next message before the position `up_to`, or None."""
        if self._read_to >= up_to:
            return None
        length, kind = _FRAME.unpack(self._get(self._read_to, _FRAME.size))
        data = self._get(self._read_to + _FRAME.size, length)
        self._read_to += _padded(length)
        return kind, data

    def ahead(self, position: int, up_to: int) -> Iterator[tuple[int, int, bytes]]:
        """Yield the messages from a position before `up_to`, each with the position behind it, without reading them.

        They begin with the first that is not freed: the one that was read last, until `commit`.
        """
        position = max(position, self.tail)
        while position < up_to:
            length, kind = _FRAME.unpack(self._get(position, _FRAME.size))
            data = self._get(position + _FRAME.size, length)
            position += _padded(length)
            yield position, kind, data

    def commit(self) -> None:
        """Free all messages that were read."""
        self._counters[8] = self._read_to

    def close(self) -> None:
        """Unmap the memory and close the descriptor."""
        del self._counters
        self._map.close()
        os.close(self.descriptor)

    def _put(self, position: int, data: bytes) -> None:
        start = position % self.size
        fits = min(len(data), self.size - start)
        self._map[_HEADER + start : _HEADER + start + fits] = data[:fits]
        if fits < len(data):
            self._map[_HEADER : _HEADER + len(data) - fits] = data[fits:]

    def _get(self, position: int, length: int) -> bytes:
        start = position % self.size
        fits = min(length, self.size - start)
        data = self._map[_HEADER + start : _HEADER + start + fits]
        return data if fits == length else data + self._map[_HEADER : _HEADER + length - fits]


def _padded(length: int) -> int:
    """Return a message's bytes in the ring: frame and data, rounded up to a multiple of 8."""
    return (_FRAME.size + length + 7) & ~7
