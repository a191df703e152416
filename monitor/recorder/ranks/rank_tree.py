"""What a rank's recorder has to do with the others': records and anomalies go up the tree, incidents come down."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np

from trainsentry.anomaly.anomaly import Anomaly
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import SeriesTable
from trainsentry.monitor.recorder import messages
from trainsentry.monitor.recorder.ranks import framing
from trainsentry.monitor.recorder.ranks.comparison import Comparison, differences, is_compared
from trainsentry.monitor.recorder.ranks.network import Network, new_selector
from trainsentry.monitor.recorder.ranks.peer_messages import (
    ALL,
    BACK,
    DEFINE,
    DONE,
    END,
    FOUND,
    MAX_INVALID,
    PARTS,
    InvalidMessage,
    PeerMessages,
    checked_record,
)
from trainsentry.monitor.recorder.ranks.shard_assembly import ShardAssembly, is_global
from trainsentry.monitor.recorder.ranks.tree_position import TreePosition
from trainsentry.monitor.recorder.ranks.uplink import Uplink

ANOMALIES_PER_MESSAGE: Final = 5_000
"""Anomalies told of in one message: some two million bytes, and as many as an incident keeps."""

MESSAGES: Final = "messages of other ranks"
"""The part that is said to have failed where another rank's message cannot be taken."""


class TreeOwner(Protocol):
    """The session, as far as the other ranks concern it."""

    table: SeriesTable

    def take_found(self, found: list[Anomaly], step: int, *, activations: bool) -> None:
        """Take anomalies of another rank."""

    def take_parted(self, found: list[Anomaly], step: int) -> None:
        """Take what only the comparison of ranks shows."""

    def take_from_root(self, message: dict[str, Any]) -> None:
        """Take what the root says to all."""

    def take_action(self, message: dict[str, Any]) -> None:
        """Take what was done about an incident."""

    def settle_all(self) -> None:
        """Bring every incident to its end, as before a flush is answered."""

    def write_global(self, record: StepRecord) -> None:
        """Write statistics of whole tensors."""

    def failed(self, part: str, error: Exception, step: int) -> None:
        """Report a fault of ours."""


class RankTree:
    """Sends what this rank saw to its parent in the tree of recorders, or puts it together where it has none.

    A rank whose parent cannot be reached goes on by itself: `alone` says so.
    """

    def __init__(self, position: TreePosition, owner: TreeOwner, max_wait: float) -> None:
        self.position = position
        self.owner = owner
        self.max_wait = max_wait
        self.network = Network(position)
        self.up = Uplink(self.network, self._greet_parent)
        self.is_root = position.parent is None
        self.assembly: ShardAssembly | None = None
        if position.children or self.is_root:
            members = {position.rank, *position.children}
            self.assembly = ShardAssembly(position.rank, members, final=self.is_root)
            self.assembly.use_table(position.rank, owner.table)
        self.comparison = Comparison()
        self._heard = PeerMessages(position.ranks)
        self._nonsense: Counter[int] = Counter()
        self._far_ahead: set[int] = set()
        self._wanted = np.zeros(0, bool)
        self._asked: set[int] = set()
        self._known_children: set[int] = set()
        self._gone: set[int] = set()
        self._ended = -1
        self._told_alone = False

    @property
    def alone(self) -> bool:
        """Whether this rank has a parent that it cannot reach."""
        return not self.is_root and self.network.lost_parent

    # ------------------------------------------------------------------ from this rank

    def take_own(self, record: StepRecord) -> None:
        """Send this rank's part of tensors that the ranks hold together, or keep it until all have come."""
        new = self.owner.table.series[len(self._wanted) :]
        if new:
            self._wanted = np.append(self._wanted, [is_global(s) or is_compared(s) for s in new])
        rows = record.select(self._wanted[record.ids])
        if self.assembly is not None:
            self._take(self.assembly, self.position.rank, rows)
            self._pass_on_complete()
        else:
            self.up.record(self.owner.table, rows)

    def _take(self, assembly: ShardAssembly, rank: int, record: StepRecord) -> None:
        """Take a rank's record, unless it is from before a rollback, or from a step where no other can be by now."""
        if assembly.is_far_ahead(rank, record.step):
            self._tell_of_step(rank, record.step)
            return
        if assembly.is_outdated(rank) and assembly.has_gone_back(rank, record.step):
            self.comparison.go_back(record.step, assembly.go_back(rank, record.step))
        if not assembly.is_outdated(rank):
            assembly.take(rank, record)
            self.comparison.take(rank, assembly.table_of(rank), record)

    def _tell_of_step(self, rank: int, step: int) -> None:
        """Say once of a rank that its records are left out."""
        if rank not in self._far_ahead:
            self._far_ahead.add(rank)
            error = InvalidMessage(
                f"rank {rank} speaks of step {step}, far ahead of all others: such records are left out"
            )
            self.owner.failed(MESSAGES, error, -1)

    def send_found(self, record: StepRecord, found: list[Anomaly], *, activations: bool) -> None:
        """Send anomalies to the root, and ask for its verdict where the trainer waits for one."""
        if not found and not record.examined:
            return
        lines = [a.to_json() for a in found]
        for start in range(0, max(len(lines), 1), ANOMALIES_PER_MESSAGE):
            last = start + ANOMALIES_PER_MESSAGE >= len(lines)
            self.up.message(
                {
                    "type": FOUND,
                    "rank": self.position.rank,
                    "step": record.step,
                    "anomalies": lines[start : start + ANOMALIES_PER_MESSAGE],
                    "activations": activations,
                    "examined": record.examined and last,
                }
            )

    def note_data_parallel(self, message: dict[str, Any]) -> None:
        """Note that a rank is to have data of its own; every recorder on the way to the root compares some."""
        self.comparison.data_parallel.add(message["rank"])
        if not self.is_root:
            self.up.message(message)

    def tell_root(self, message: dict[str, Any]) -> None:
        """Send a message up the tree."""
        self.up.message(message)

    def ask_flush(self, token: int) -> None:
        """Have the root answer when it has judged what was sent."""
        self._asked.add(token)
        self.up.message({"type": messages.FLUSH, "for": self.position.rank, "token": token})

    def tell_all(self, message: dict[str, Any]) -> None:
        """Send a message down the tree."""
        self.network.tell_children(message)

    def go_back(self, step: int) -> None:
        """Take steps from `step` on anew."""
        self._ended = min(self._ended, step - 1)
        if self.assembly is not None:
            self.comparison.go_back(step, self.assembly.go_back(self.position.rank, step))
        if not self.is_root:
            self.up.message({"type": BACK, "step": step})

    # ------------------------------------------------------------------ from the others

    def pump(self) -> None:
        """Send and receive what is possible now, without waiting."""
        try:
            for rank, kind, data in self.network.pump():
                self._handle_guarded(rank, kind, data)
        except Exception as error:  # noqa: BLE001 - the edge of the connections
            self.cut_off(error)
        self._note_coming_and_going()
        self._pass_on_complete()
        self._say_alone()
        if self.alone and self._asked:
            asked, self._asked = self._asked, set()
            self.owner.settle_all()
            for token in asked:  # nobody else will answer
                self.owner.take_from_root({"type": messages.FLUSHED, "token": token})

    def cut_off(self, error: Exception) -> None:
        """Go on recording without the others, after a fault of ours in what connects this recorder to theirs."""
        self.network.close()
        self.network.lose_parent()
        self.owner.failed("connections between recorders", error, -1)

    def _handle_guarded(self, rank: int, kind: int, data: bytes) -> None:
        """Take a message; what cannot be taken costs the rank that it comes from, and no other."""
        if rank in self.network.banned:
            return
        try:
            self._handle(rank, kind, data)
        except Exception as error:  # noqa: BLE001 - one message of another must not end all
            self._nonsense[rank] += 1
            self.owner.failed(MESSAGES, error, -1)
            if self._nonsense[rank] == MAX_INVALID:
                self._hear_no_more(rank)

    def _hear_no_more(self, rank: int) -> None:
        """Go on without a rank whose messages make no sense."""
        if self._is_parent(rank):
            self.network.lose_parent()  # which is said: this rank is alone
            return
        self.network.ban(rank)
        if self.assembly is not None:
            self.assembly.leave_out(rank)
        error = ConnectionError(f"the recorder of rank {rank} has sent {MAX_INVALID} messages that make no sense")
        self.owner.failed(f"what the recorder of rank {rank} sends", error, -1)

    def _is_parent(self, rank: int) -> bool:
        return self.network.parent is not None and rank == self.network.parent.rank

    def _say_alone(self) -> None:
        """Tell the trainer, whose log is where people look, that this rank is judged by itself from here on."""
        if self.alone and not self._told_alone:
            self._told_alone = True
            error = ConnectionError(
                f"the recorder of rank {self.position.rank} cannot reach those of other ranks: its incidents are its "
                "own, and global/ lacks what it holds"
            )
            self.owner.failed("recorders of other ranks", error, -1)

    def _handle(self, rank: int, kind: int, data: bytes) -> None:
        if self._is_parent(rank):
            if kind != framing.JSON:
                raise InvalidMessage("a record from a parent")
            self._hear_root(self._heard.of_root(data))
        elif kind == framing.RECORD:
            if self.assembly is not None:
                self._take(self.assembly, rank, checked_record(data, self.assembly.table_of(rank)))
        else:
            self._hear_of_child(rank, self._heard.of_child(data))

    def _hear_of_child(self, rank: int, message: dict[str, Any]) -> None:
        """Take what a rank that reports here says of itself, or hands on."""
        if message["type"] in {BACK, DEFINE, PARTS, DONE}:
            if self.assembly is not None:
                self._hear_child(self.assembly, rank, message)
        elif message["type"] == messages.DATA_PARALLEL:
            self.note_data_parallel(message)
        elif not (self.is_root or self.alone):
            self.up.message(message)
        elif message["type"] == FOUND:
            self._judge(message, outdated=self.assembly is not None and self.assembly.is_outdated(rank))
        elif message["type"] == messages.ACTION:
            self.owner.take_action(message)
        elif message["type"] == messages.FLUSH:
            self.owner.settle_all()
            self.tell_all({"type": messages.FLUSHED, "for": message["for"], "token": message["token"]})

    def _hear_child(self, assembly: ShardAssembly, rank: int, message: dict[str, Any]) -> None:
        """Take what tells of the records of a rank that reports here."""
        if message["type"] == PARTS and assembly.is_far_ahead(rank, message["step"]):
            self._tell_of_step(rank, message["step"])
        elif message["type"] == BACK:
            self.comparison.go_back(message["step"], assembly.go_back(rank, message["step"]))
        elif message["type"] == DEFINE:
            assembly.define(rank, message)
        elif message["type"] == PARTS and not assembly.is_outdated(rank):
            self.comparison.take_parts(rank, message)
            assembly.take_copies(rank, message["step"], message["copies"])
            assembly.finish(rank, message["step"])
        elif message["type"] == DONE and (message["step"] == ALL or not assembly.is_outdated(rank)):
            assembly.finish(rank, message["step"])

    def _hear_root(self, message: dict[str, Any]) -> None:
        if message["type"] == END:
            self._told_alone = True  # it has ended as it was told to
            self.network.lose_parent()
            return
        if message["type"] == messages.FLUSHED and message["for"] == self.position.rank:
            self._asked.discard(message["token"])
        self.network.tell_children(message)
        self.owner.take_from_root(message)

    def _judge(self, message: dict[str, Any], *, outdated: bool) -> None:
        """Take what a rank has found, unless it is from before a rollback, and answer where its trainer waits."""
        if not outdated:
            found = [Anomaly.from_json(a) for a in message["anomalies"]]
            self.owner.take_found(found, message["step"], activations=message["activations"])
        if message["examined"]:
            self.tell_all({"type": messages.EXAMINED, "for": message["rank"], "step": message["step"]})

    def _greet_parent(self) -> None:
        """Tell a parent that has come, perhaps another's successor, what it must know, and ask again what was asked."""
        for rank in self.comparison.data_parallel:
            self.up.message({"type": messages.DATA_PARALLEL, "rank": rank})
        for token in self._asked:
            self.up.message({"type": messages.FLUSH, "for": self.position.rank, "token": token})

    def _note_coming_and_going(self) -> None:
        """Define everything anew for a new parent; wait no longer for children that are gone or never came."""
        self.up.note_connection()
        children = set(self.network.children)
        if self.assembly is not None:
            missing = self._known_children - children
            if not self.network.awaited:
                missing |= set(self.position.children) - children
            for rank in missing:
                self.assembly.finish(rank, ALL)
            for rank in children & self._gone:
                self.assembly.await_again(rank)
            self._gone = missing
        self._known_children |= children

    def _pass_on_complete(self) -> None:
        """Put together what is complete; an error of ours costs that, and not the recorder."""
        if self.assembly is None:
            return
        try:
            if self.is_root or self.alone:
                self.assembly.copies.judges = True  # nobody else will
                self._conclude(self.assembly)
            else:
                self._hand_on(self.assembly)
        except Exception as error:  # noqa: BLE001 - the edge of what ranks do together
            self.owner.failed("comparison of ranks", error, -1)

    def _conclude(self, assembly: ShardAssembly) -> None:
        """Write what is whole, and say what the ranks show together."""
        for record in assembly.complete():
            if self.is_root:
                self.owner.write_global(record)
        settled = max(assembly.settled, self.comparison.overdue)
        for step, found in differences(assembly, list(self.comparison.judge(settled))):
            self.owner.take_parted(found, step)

    def _hand_on(self, assembly: ShardAssembly) -> None:
        """Send what is complete up, step by step: its record, and then what else is told of it, which ends the step."""
        for record in assembly.complete():
            self._end_steps(assembly, record.step - 1)
            self.up.record(assembly.table, record)
            self._end_steps(assembly, record.step)
        settled = max(assembly.settled, self.comparison.overdue)
        self._end_steps(assembly, settled)
        if self._ended < settled < ALL:  # steps of which nothing is to be told have ended too
            self._ended = settled
            self.up.message({"type": DONE, "rank": self.position.rank, "step": settled})

    def _end_steps(self, assembly: ShardAssembly, settled: int) -> None:
        """Judge calls among the ranks that report here; send up the rest of steps up to `settled`."""
        for step, found in differences(assembly, list(self.comparison.judge(settled, final=False))):
            self.comparison.take_found(step, found)
        for parts in self.comparison.left(settled, assembly.copies.left(settled)):
            self.up.message({"type": PARTS, **parts})

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Send what is still to be sent; at the root, wait for the others to end, at most `max_wait` seconds."""
        if self.assembly is not None:
            self.assembly.finish(self.position.rank, ALL)
        self._wait_until(lambda: self.assembly is None or self.assembly.done == ALL)
        if not self.is_root:
            self.up.message({"type": DONE, "rank": self.position.rank, "step": ALL})
            self._wait_until(lambda: self.alone or not (self.network.unsent or self.up.waits))
        self.network.tell_children({"type": END})
        self.network.close()

    def _wait_until(self, finished: Callable[[], bool]) -> None:
        end = time.monotonic() + self.max_wait
        self.pump()
        while not finished() and (left := end - time.monotonic()) > 0:
            self._sleep(left)
            self.pump()
        if not finished() and self.assembly is not None:
            for rank in self.position.children:
                self.assembly.finish(rank, ALL)
            self._pass_on_complete()

    def _sleep(self, left: float) -> None:
        """Wait for the connections for a moment, or as long as is left."""
        try:
            with new_selector() as selector:
                self.network.register(selector)
                if selector.get_map():
                    selector.select(min(left, 0.1))
                    return
        except (OSError, ValueError, KeyError) as error:  # a socket that is none any more
            self.cut_off(error)
        time.sleep(min(left, 0.05))
