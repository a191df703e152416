"""Recorders of several hosts without sockets: tests hand their bytes over, cut at any place."""

import json
from types import SimpleNamespace

import numpy as np

from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import (
    COMMUNICATION_CALL,
    COMMUNICATION_INPUT,
    COMMUNICATION_OUTPUT,
    Layout,
    Series,
    SeriesTable,
)
from trainsentry.collectors.statistics import COLUMNS, INFS, MAX, MEAN, MIN, NANS, NORM, VALUE, ZEROS
from trainsentry.monitor.recorder.ranks import framing
from trainsentry.monitor.recorder.ranks.rank_tree import RankTree
from trainsentry.monitor.recorder.ranks.tree_position import Address, TreePosition

WHOLE = Layout((4,), "float32", 4)
ALONE = Layout((), "float64", 1)
HALVES = [Layout((4,), "float32", 2, (4,), region) for region in ("0:2", "2:4")]
GRADIENT = Series("w", "gradient")
LOSS = Series("loss", "loss", scalar=True)


class Wire:
    """Replaces a recorder's sockets: `inbox` holds arrived frames, `sent` those sent to the parent."""

    def __init__(self, parent, children):
        self.parent = None if parent is None else SimpleNamespace(rank=parent)
        self.children = dict.fromkeys(children)
        self.lost_parent, self.awaited, self.unsent, self.banned = False, True, 0, set()
        self.inbox, self.sent = [], []

    def pump(self):
        arrived, self.inbox = self.inbox, []
        return iter(arrived)

    def tell_parent(self, message):
        self.sent.append((framing.JSON, json.dumps(message).encode()))

    def send_up(self, kind, data):
        self.sent.append((kind, data))

    def tell_children(self, message):
        pass

    def close(self):
        self.children = {}

    def ban(self, rank):
        self.banned.add(rank)

    def lose_parent(self):
        self.parent, self.lost_parent = None, True


class Owner:
    """Replaces the session that owns a recorder's place in the tree."""

    def __init__(self):
        self.table, self.found, self.taken, self.written, self.failures = SeriesTable(), [], [], [], []

    @property
    def incidents(self):
        return self

    def observe(self, found, step, *, activations):
        self.taken += found

    def settle_all(self):
        pass

    def take_between_ranks(self, found, step):
        self.found += [(step, a.rank, a.detector, a.passed_on) for a in found]

    def write_global(self, record):
        self.written.append((record.step, len(record)))

    def failed(self, part, error, step):
        self.failures.append((part, repr(error), step))


def recorder(rank, parent, children, ranks=4):
    """A recorder in the tree; it is its own `up.network`, a `Wire`."""
    address = None if parent is None else Address(parent, "host", "", 0, "")
    made = RankTree(TreePosition(rank, tuple(range(ranks)), tuple(children), address, "word"), Owner(), 5.0)
    made.network = made.up.network = Wire(parent, children)
    return made


def row(**values):
    """One row of a record; statistics that are not given are NaN."""
    made = np.full(COLUMNS, np.nan)
    made[[NANS, INFS, ZEROS]] = 0.0
    for name, value in values.items():
        made[{"min": MIN, "max": MAX, "mean": MEAN, "norm": NORM, "value": VALUE}[name]] = value
    return made


def weights(value, layout=WHOLE):
    """The row of a gradient with `value` as its fingerprint."""
    return [(GRADIENT, layout, row(min=-1.0, max=1.0, mean=0.1, norm=value, value=value))]


def loss(value=1.0):
    """The row of a loss."""
    return [(LOSS, ALONE, row(value=value))]


def number(name, value):
    """The row of a number that the loop logs."""
    return [(Series(name, name, scalar=True), ALONE, row(value=value))]


def all_reduce(size, put_in, got, norm=10.0):
    """The rows of one sum over `size` ranks, of 100 elements."""
    index, layout = "all_reduce|world|world.all_reduce.0", Layout((100,), "float32", 100)
    call = np.full(COLUMNS, np.nan)
    call[:6] = 0, 0.01, 400, size, 0, 1
    sides = ((COMMUNICATION_INPUT, put_in), (COMMUNICATION_OUTPUT, got))
    rows = [(Series(f"c.{q}", q, index=index), layout, row(min=-1, max=1, mean=t / 100, norm=norm)) for q, t in sides]
    return [(Series("world.all_reduce.0", COMMUNICATION_CALL, index=index), layout, call), *rows]


def record(table, step, rank, rows):
    """A record of rows."""
    ids = np.array([table.series_id(series) for series, *_ in rows], np.int32)
    layouts = np.array([table.layout_id(layout) for _, layout, _ in rows], np.int32)
    return StepRecord(step, rank, ids, layouts, np.array([v for *_, v in rows], float).reshape(-1, COLUMNS))


class Leaf:
    """A rank that only sends to a recorder."""

    def __init__(self, rank):
        self.rank, self.table, self._defined = rank, SeriesTable(), (0, 0)

    def begin_anew(self):
        """As another process that knows nothing of the first."""
        self.table, self._defined = SeriesTable(), (0, 0)

    def go_back(self, to, step):
        """Say that the rank goes back."""
        to.network.inbox.append((self.rank, framing.JSON, json.dumps({"type": "back", "step": step}).encode()))

    def tell(self, to, step, rows):
        """Send a record of one step."""
        made = record(self.table, step, self.rank, rows)
        definitions = {"type": "define", **self.table.definitions(*self._defined)}
        self._defined = (len(self.table.series), len(self.table.layouts))
        to.network.inbox.append((self.rank, framing.JSON, json.dumps(definitions).encode()))
        to.network.inbox.append((self.rank, framing.RECORD, b"".join(made.encode())))


def own(of, step, rows):
    """Give a recorder the record of its own rank."""
    of.take_own(record(of.owner.table, step, of.position.rank, rows))


def carry(below, above, first=None):
    """Hand over the sent frames in two reads."""
    frames, below.network.sent = below.network.sent, []
    for part in (frames[:first], frames[first:] if first is not None else []):
        above.network.inbox += [(below.position.rank, *frame) for frame in part]
        above.pump()
