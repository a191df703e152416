"""A rank whose recorder is a process and receives records from other recorders."""

import socket
import time
from pathlib import Path

import numpy as np
from recorder_tree import GRADIENT, WHOLE, weights

from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import SeriesTable
from trainsentry.collectors.statistics import COLUMNS
from trainsentry.monitor.config.files import load_config
from trainsentry.monitor.recorder import messages
from trainsentry.monitor.recorder.link import RecorderLink
from trainsentry.monitor.recorder.ranks.network import Network
from trainsentry.monitor.recorder.ranks.tree_position import Address, TreePosition
from trainsentry.monitor.recorder.recorder_settings import RecorderSettings

RANKS = (0, 1, 2)


class Recording:
    """Rank 0 with its recorder, which waits for those of ranks 1 and 2."""

    def __init__(self, out):
        self.out = out
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.endpoint = self.listening.getsockname()
        position = TreePosition(0, RANKS, RANKS[1:], None, "word", self.listening.fileno())
        self.table = SeriesTable()
        config = load_config({"statistics": ["min", "max", "norm"], "export": {"max_wait": 20.0}, "ring_size": 2**20})
        settings = RecorderSettings(config.model_dump(mode="json"), str(out), 0, position=position)
        self.link = RecorderLink(settings, self.table)
        self.heard = []
        self.steps = 0

    @property
    def pid(self):
        return self.link.running.process.pid

    def record(self, steps=1):
        """Record steps, and wait until they are judged."""
        for _ in range(steps):
            self.link.send_record(record(self.table, self.steps, 0))
            self.steps += 1
        heard, answer = self.link.ask(messages.FLUSH, messages.FLUSHED, 60)
        self.heard += heard
        assert answer is not None, "the recorder does not answer"

    def memory(self):
        """Bytes that the recorder has held at most."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024

    def others(self):
        """Connect the recorders of ranks 1 and 2."""
        address = Address(0, "here", *self.endpoint, "word")
        made = [Network(TreePosition(rank, RANKS, (), address, "own")) for rank in RANKS[1:]]
        end = time.monotonic() + 60
        while any(other.parent is None for other in made):
            assert not [message for other in made for message in other.pump()]
            assert time.monotonic() < end
            time.sleep(0.001)
        return made

    def close(self, *, others=True):
        """End the recorder, once; the other ranks' have come and gone, so that it waits for none."""
        if self.listening.fileno() >= 0:
            here = self.others() if others and self.link.dead is None else []
            self.record()
            for other in here:
                other.close()
            self.listening.close()
            self.heard += self.link.close(60)

    def check(self, *, others=True):
        """Look that the first recorder has written every step."""
        self.close(others=others)
        lines = (self.out / "rank0" / "gradient_0-999.csv").read_text().splitlines()
        assert self.link.lost_recorders == []
        assert self.link.dead in (None, "closed")
        assert [line.split(",")[2] for line in lines[1:]] == [str(step) for step in range(self.steps)]


def record(table, step, rank):
    """A record of one gradient, equal on all ranks."""
    rows = weights(1.0 + step)
    ids, layouts = np.array([table.series_id(GRADIENT)], np.int32), np.array([table.layout_id(WHOLE)], np.int32)
    return StepRecord(step, rank, ids, layouts, np.array([values for *_, values in rows]).reshape(1, COLUMNS))
