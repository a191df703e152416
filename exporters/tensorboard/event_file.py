"""Writes TensorBoard event files: one event per step with all its values.

The framing is TFRecord's: length, masked CRC-32C of the length, data, masked CRC-32C of the data. A native checksum
and one event per step make it fast; the messages are TensorBoard's own protocol buffers.
"""

import os
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import google_crc32c
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary

from trainsentry.collectors.series import ACTIVATION_QUANTITIES, GRADIENT_UNREDUCED, writable
from trainsentry.exporters.files.whole_writes import append_whole, cut_back, is_removed

EVENTS: Final = "events.out.tfevents"
"""Prefix of an event file's name."""

_MASK: Final = 0xA282EAD8


class EventFile:
    """One event file; TensorBoard can read it after every `write`, even a failed one."""

    def __init__(self, directory: Path, suffix: str = "", prefix: str = EVENTS) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        name = f"{prefix}.{int(time.time())}.{socket.gethostname()}.{os.getpid()}{suffix}"
        self.path = directory / name
        self._file = self.path.open("ab", buffering=0)
        self._tags: Sequence[str] | None = None
        self._event = Event()
        self._values: list[Summary.Value] = []
        if self._file.tell() == 0:
            self._append(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, step: int, wall_time: float, tags: Sequence[str], values: Sequence[float]) -> None:
        """Append one event with all values of a step.

        If `tags` is the same list object as in the previous call, its message is reused with the new values.
        """
        if tags is not self._tags:
            self._tags = tags
            self._event = Event(summary=Summary(value=[Summary.Value(tag=writable(tag)) for tag in tags]))
            self._values = list(self._event.summary.value)
        for entry, value in zip(self._values, values, strict=True):
            entry.simple_value = value
        self._event.step, self._event.wall_time = step, wall_time
        self._append(self._event)

    def append(self, step: int, wall_time: float, values: Sequence[Summary.Value]) -> None:
        """Append one event with values other than numbers: text, pictures, histograms."""
        self._append(Event(wall_time=wall_time, step=step, summary=Summary(value=values)))

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._file.seek(0, os.SEEK_END)

    def cut_back(self, size: int) -> None:
        """Cut the file back to `size` bytes."""
        cut_back(self._file, size)

    def is_removed(self, *, thorough: bool) -> bool:
        """Whether somebody has removed the file; `thorough` also checks the path."""
        return is_removed(self._file, self.path, thorough=thorough)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, event: Event) -> None:
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        append_whole(self._file, b"".join([length, _masked_crc(length), data, _masked_crc(data)]))


def tag(quantity: str, statistic: str, name: str, micro_step: int, *, scalar: bool = False, vpp_stage: int = 0) -> str:
    """Return a value's tag; a statistic of all layers forms one group.

    Quantities recorded per micro-step, and any micro-step above 0, have the micro-step after the name. Model chunks
    above 0 have their number before it.

    >>> tag("gradient", "norm", "fc.weight", 0), tag("activation_output", "max", "fc.output.0", 1)
    ('gradient.norm/fc.weight', 'activation_output.max/fc.output.0:1')
    """
    if scalar:
        return f"scalars/{name}" + (f":{micro_step}" if micro_step else "")
    per_micro_step = quantity in ACTIVATION_QUANTITIES or quantity == GRADIENT_UNREDUCED
    chunk = f"vp{vpp_stage}:" if vpp_stage > 0 else ""
    return f"{quantity}.{statistic}/{chunk}{name}" + (f":{micro_step}" if per_micro_step or micro_step else "")


def _masked_crc(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF)
