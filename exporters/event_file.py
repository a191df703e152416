"""TensorBoard event files: one event per step with all its values.

The framing is TFRecord's: length, masked CRC-32C of the length, data, masked CRC-32C of the data. A native
checksum and one event per step are what make it fast; the messages are TensorBoard's own protocol buffers.
"""

import os
import socket
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import google_crc32c
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary

from trainsentry.collectors.series import ACTIVATION_QUANTITIES, GRADIENT_UNREDUCED

_MASK: Final = 0xA282EAD8


class EventFile:
    """One event file, opened with the first event; readable by TensorBoard after every `write`."""

    def __init__(self, directory: Path, suffix: str = "") -> None:
        directory.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}{suffix}"
        self.path = directory / name
        self._file = self.path.open("ab", buffering=0)
        if self._file.tell() == 0:
            self._append(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, step: int, wall_time: float, values: Iterable[tuple[str, float]]) -> None:
        """Append one event with all values of a step, each a tag and a number."""
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values])
        self._append(Event(wall_time=wall_time, step=step, summary=summary))

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._file.tell()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, event: Event) -> None:
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        self._file.write(b"".join([length, _masked_crc(length), data, _masked_crc(data)]))


def tag(quantity: str, statistic: str, name: str, micro_step: int, *, scalar: bool = False) -> str:
    """Return a value's tag: a statistic of all layers stands in one group.

    Quantities that are recorded per micro-step carry it behind the name, and so does any later micro-step.

    >>> tag("gradient", "norm", "fc.weight", 0), tag("activation_output", "max", "fc.output.0", 1)
    ('gradient.norm/fc.weight', 'activation_output.max/fc.output.0:1')
    """
    if scalar:
        return f"scalars/{name}" + (f":{micro_step}" if micro_step else "")
    per_micro_step = quantity in ACTIVATION_QUANTITIES or quantity == GRADIENT_UNREDUCED
    return f"{quantity}.{statistic}/{name}" + (f":{micro_step}" if per_micro_step or micro_step else "")


def _masked_crc(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF)
