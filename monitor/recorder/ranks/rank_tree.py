"""Connects a rank's recorder to the others: records and anomalies go up the tree, incidents come down."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np

from trainsentry.anomaly.anomaly import Anomaly
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import SeriesTable
from trainsentry.monitor.recorder import messages
from trainsentry.monitor.recorder.ranks import framing, peer_messages
from trainsentry.monitor.recorder.ranks.comparison import ComparedSeries, Comparison, differences
from trainsentry.monitor.recorder.ranks.network import Network, new_selector
from trainsentry.monitor.recorder.ranks.peer_messages import InvalidMessage, PeerMessages, checked_record
from trainsentry.monitor.recorder.ranks.shard_assembly import ShardAssembly, may_have_replicas
from trainsentry.monitor.recorder.ranks.tree_position import TreePosition
from trainsentry.monitor.recorder.ranks.uplink import Uplink

ANOMALIES_PER_MESSAGE: Final = 5_000
"""Anomalies in one message: about 2 MB, and as many as an incident keeps."""

MESSAGES: Final = "messages of other ranks"
"""The part named as failed when another rank's message cannot be used."""


class TreeIncidents(Protocol):
    """The session's publisher of incidents, as the tree uses it."""

    def observe(self, found: list[Anomaly], step: int, *, activations: bool) -> None:
        """Take anomalies of another rank."""

    def take_between_ranks(self, found: list[Anomaly], step: int) -> None:
        """Take anomalies that only the comparison of ranks shows."""

    def take_action(self, message: dict[str, Any]) -> None:
        """Take a trainer's note about an incident."""


class TreeOwner(Protocol):
    """The session, as the tree uses it."""

    table: SeriesTable

    @property
    def incidents(self) -> TreeIncidents:
        """The publisher of incidents."""

    def take_from_root(self, message: dict[str, Any]) -> None:
        """Take a message of the root to all ranks."""

    def settle_all(self) -> None:
        """Settle every incident, before a flush is answered."""

    def write_global(self, record: StepRecord) -> None:
        """Write statistics of whole tensors."""

    def failed(self, part: str, error: Exception, step: int) -> None:
        """Report a fault of the recorder."""


class RankTree:
    """Sends this rank's records and anomalies to its parent in the tree of recorders; the root combines them.

    A rank that cannot reach its parent continues by itself (`alone`).
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
        self._checks = PeerMessages(position.ranks)
        self._invalid: Counter[int] = Counter()
        self._far_ahead: set[int] = set()
        self._wanted, self._compared = np.zeros(0, bool), ComparedSeries()
        self._asked: set[int] = set()
        self._known_children: set[int] = set()
        self._gone: set[int] = set()
        self._ended = -1
        self._reported_alone = False

    @property
    def alone(self) -> bool:
        """Whether this rank has a parent that it cannot reach."""
        return not self.is_root and self.network.lost_parent

    # ------------------------------------------------------------------ from this rank

    def take_own(self, record: StepRecord) -> None:
        """Send this rank's parts of tensors that ranks share, or keep them until all parts have arrived."""
        new = self.owner.table.series[len(self._wanted) :]
        if new:
            self._wanted = np.append(self._wanted, [may_have_replicas(s) or self._compared.takes(s) for s in new])
        rows = record.select(self._wanted[record.ids])
        if self.assembly is not None:
            self._take(self.assembly, self.position.rank, rows)
            self._pass_on_complete()
        else:
            self.up.record(self.owner.table, rows)

    def _take(self, assembly: ShardAssembly, rank: int, record: StepRecord) -> None:
        """Add a rank's record, unless it is from before a rollback or impossibly far ahead."""
        if assembly.is_far_ahead(rank, record.step):
            self._report_far_ahead(rank, record.step)
            return
        if assembly.is_outdated(rank) and assembly.has_gone_back(rank, record.step):
            self.comparison.go_back(record.step, assembly.go_back(rank, record.step))
        if not assembly.is_outdated(rank):
            assembly.take(rank, record)
            self.comparison.take(rank, assembly.table_of(rank), record)

    def _report_far_ahead(self, rank: int, step: int) -> None:
        """Report once per rank that its records are left out."""
        if rank not in self._far_ahead:
            self._far_ahead.add(rank)
            error = InvalidMessage(f"rank {rank} sends step {step}, far ahead of all others: such records are left out")
            self.owner.failed(MESSAGES, error, -1)

    def send_found(self, record: StepRecord, found: list[Anomaly], *, activations: bool) -> None:
        """Send anomalies to the root, and request its verdict if the trainer waits for one."""
        if not found and not record.examined:
            return
        lines = [a.to_json() for a in found]
        for start in range(0, max(len(lines), 1), ANOMALIES_PER_MESSAGE):
            last = start + ANOMALIES_PER_MESSAGE >= len(lines)
            self.up.message(
                {
                    "type": peer_messages.FOUND,
                    "rank": self.position.rank,
                    "step": record.step,
                    "anomalies": lines[start : start + ANOMALIES_PER_MESSAGE],
                    "activations": activations,
                    "examined": record.examined and last,
                }
            )

    def note_data_parallel(self, message: dict[str, Any]) -> None:
        """Note that a rank must have its own data; every recorder on the way to the root compares some ranks."""
        self.comparison.data_parallel.add(message["rank"])
        if not self.is_root:
            self.up.message(message)

    def ask_flush(self, token: int) -> None:
        """Ask the root to answer when it has judged everything sent so far."""
        self._asked.add(token)
        self.up.message({"type": messages.FLUSH, "for": self.position.rank, "token": token})

    def tell_all(self, message: dict[str, Any]) -> None:
        """Send a message down the tree."""
        self.network.tell_children(message)

    def go_back(self, step: int) -> None:
        """Roll back: expect steps from `step` on again."""
        self._ended = min(self._ended, step - 1)
        if self.assembly is not None:
            self.comparison.go_back(step, self.assembly.go_back(self.position.rank, step))
        if not self.is_root:
            self.up.message({"type": peer_messages.BACK, "step": step})

    # ------------------------------------------------------------------ from the others

    def pump(self) -> None:
        """Send and receive without waiting."""
        try:
            for rank, kind, data in self.network.pump():
                self._handle_guarded(rank, kind, data)
        except Exception as error:  # noqa: BLE001 - the edge of the connections
            self.cut_off(error)
        self._note_coming_and_going()
        self._pass_on_complete()
        self._report_alone()
        if self.alone and self._asked:
            asked, self._asked = self._asked, set()
            self.owner.settle_all()
            for token in asked:  # no other recorder will answer
                self.owner.take_from_root({"type": messages.FLUSHED, "token": token})

    def cut_off(self, error: Exception) -> None:
        """Continue recording without the other ranks, after a fault in the connections."""
        self.network.close()
        self.network.lose_parent()
        self.owner.failed("connections between recorders", error, -1)

    def _handle_guarded(self, rank: int, kind: int, data: bytes) -> None:
        """Handle a message; an invalid one affects only the rank that sent it."""
        if rank in self.network.banned:
            return
        try:
            self._handle(rank, kind, data)
        except Exception as error:  # noqa: BLE001 - one peer's message must not end the recording
            self._invalid[rank] += 1
            self.owner.failed(MESSAGES, error, -1)
            if self._invalid[rank] == peer_messages.MAX_INVALID:
                self._ignore_rank(rank)

    def _ignore_rank(self, rank: int) -> None:
        """Continue without a rank that keeps sending invalid messages."""
        if self._is_parent(rank):
            self.network.lose_parent()  # `_report_alone` reports it
            return
        self.network.ban(rank)
        if self.assembly is not None:
            self.assembly.leave_out(rank)
        error = ConnectionError(f"the recorder of rank {rank} has sent {peer_messages.MAX_INVALID} invalid messages")
        self.owner.failed(f"input from rank {rank}", error, -1)

    def _is_parent(self, rank: int) -> bool:
        return self.network.parent is not None and rank == self.network.parent.rank

    def _report_alone(self) -> None:
        """Report to the trainer's log that this rank is judged alone from now on."""
        if self.alone and not self._reported_alone:
            self._reported_alone = True
            error = ConnectionError(
                f"the recorder of rank {self.position.rank} cannot reach those of other ranks: it ranks its own "
                "incidents, and global/ lacks its tensors"
            )
            self.owner.failed("recorders of other ranks", error, -1)

    def _handle(self, rank: int, kind: int, data: bytes) -> None:
        if self._is_parent(rank):
            if kind != framing.JSON:
                raise InvalidMessage("a record from a parent")
            self._handle_from_root(self._checks.of_root(data))
        elif kind == framing.RECORD:
            if self.assembly is not None:
                self._take(self.assembly, rank, checked_record(data, self.assembly.table_of(rank)))
        else:
            self._handle_from_child(rank, self._checks.of_child(data))

    def _handle_from_child(self, rank: int, message: dict[str, Any]) -> None:
        """Handle a child's message, about itself or forwarded."""
        if message["type"] in {peer_messages.BACK, peer_messages.DEFINE, peer_messages.PARTS, peer_messages.DONE}:
            if self.assembly is not None:
                self._handle_records_message(self.assembly, rank, message)
        elif message["type"] == messages.DATA_PARALLEL:
            self.note_data_parallel(message)
        elif not (self.is_root or self.alone):
            self.up.message(message)
        elif message["type"] == peer_messages.FOUND:
            self._judge(message, outdated=self.assembly is not None and self.assembly.is_outdated(rank))
        elif message["type"] == messages.ACTION:
            self.owner.incidents.take_action(message)
        elif message["type"] == messages.FLUSH:
            self.owner.settle_all()
            self.tell_all({"type": messages.FLUSHED, "for": message["for"], "token": message["token"]})

    def _handle_records_message(self, assembly: ShardAssembly, rank: int, message: dict[str, Any]) -> None:
        """Handle a child's message about its records."""
        if message["type"] == peer_messages.PARTS and assembly.is_far_ahead(rank, message["step"]):
            self._report_far_ahead(rank, message["step"])
        elif message["type"] == peer_messages.BACK:
            self.comparison.go_back(message["step"], assembly.go_back(rank, message["step"]))
        elif message["type"] == peer_messages.DEFINE:
            assembly.define(rank, message)
        elif message["type"] == peer_messages.PARTS and not assembly.is_outdated(rank):
            self.comparison.take_parts(rank, message)
            assembly.take_copies(rank, message["step"], message["copies"])
            assembly.finish(rank, message["step"])
        elif message["type"] == peer_messages.DONE and (
            message["step"] == peer_messages.ALL or not assembly.is_outdated(rank)
        ):
            assembly.finish(rank, message["step"])

    def _handle_from_root(self, message: dict[str, Any]) -> None:
        if message["type"] == peer_messages.END:
            self._reported_alone = True  # a regular end needs no report
            self.network.lose_parent()
            return
        if message["type"] == messages.FLUSHED and message["for"] == self.position.rank:
            self._asked.discard(message["token"])
        self.network.tell_children(message)
        self.owner.take_from_root(message)

    def _judge(self, message: dict[str, Any], *, outdated: bool) -> None:
        """Handle a rank's anomalies, unless they are from before a rollback, and answer if its trainer waits."""
        if not outdated:
            found = [Anomaly.from_json(a) for a in message["anomalies"]]
            self.owner.incidents.observe(found, message["step"], activations=message["activations"])
        if message["examined"]:
            self.tell_all({"type": messages.EXAMINED, "for": message["rank"], "step": message["step"]})

    def _greet_parent(self) -> None:
        """Send a new parent, perhaps a successor, the data-parallel ranks and the open flush requests."""
        for rank in self.comparison.data_parallel:
            self.up.message({"type": messages.DATA_PARALLEL, "rank": rank})
        for token in self._asked:
            self.up.message({"type": messages.FLUSH, "for": self.position.rank, "token": token})

    def _note_coming_and_going(self) -> None:
        """Update the parent connection; stop waiting for children that are gone or never connected."""
        self.up.note_connection()
        children = set(self.network.children)
        if self.assembly is not None:
            missing = self._known_children - children
            if not self.network.awaited:
                missing |= set(self.position.children) - children
            for rank in missing:
                self.assembly.finish(rank, peer_messages.ALL)
            for rank in children & self._gone:
                self.assembly.await_again(rank)
            self._gone = missing
        self._known_children |= children

    def _pass_on_complete(self) -> None:
        """Combine and pass on complete steps; a fault here does not end the recorder."""
        if self.assembly is None:
            return
        try:
            if self.is_root or self.alone:
                self.assembly.copies.judges = True  # no other recorder will
                self._conclude(self.assembly)
            else:
                self._send_up(self.assembly)
        except Exception as error:  # noqa: BLE001 - the outermost frame of the comparison of ranks
            self.owner.failed("comparison of ranks", error, -1)

    def _conclude(self, assembly: ShardAssembly) -> None:
        """Write the statistics of whole tensors, and judge the differences between ranks."""
        for record in assembly.complete():
            if self.is_root:
                self.owner.write_global(record)
        settled = max(assembly.settled, self.comparison.overdue)
        for step, found in differences(assembly, list(self.comparison.judge(settled))):
            self.owner.incidents.take_between_ranks(found, step)

    def _send_up(self, assembly: ShardAssembly) -> None:
        """Send complete steps up: first a step's record, then the message that ends the step."""
        for record in assembly.complete():
            self._end_steps(assembly, record.step - 1)
            self.up.record(assembly.table, record)
            self._end_steps(assembly, record.step)
        settled = max(assembly.settled, self.comparison.overdue)
        self._end_steps(assembly, settled)
        if self._ended < settled < peer_messages.ALL:  # steps without any message have ended too
            self._ended = settled
            self.up.message({"type": peer_messages.DONE, "rank": self.position.rank, "step": settled})

    def _end_steps(self, assembly: ShardAssembly, settled: int) -> None:
        """Judge calls among the ranks below this one; send up the rest of steps up to `settled`."""
        for step, found in differences(assembly, list(self.comparison.judge(settled, final=False))):
            self.comparison.take_found(step, found)
        for parts in self.comparison.left(settled, assembly.copies.left(settled)):
            self.up.message({"type": peer_messages.PARTS, **parts})

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Send all remaining messages, and wait for the children to end, at most `max_wait` seconds."""
        if self.assembly is not None:
            self.assembly.finish(self.position.rank, peer_messages.ALL)
        self._wait_until(lambda: self.assembly is None or self.assembly.done == peer_messages.ALL)
        if not self.is_root:
            self.up.message({"type": peer_messages.DONE, "rank": self.position.rank, "step": peer_messages.ALL})
            self._wait_until(lambda: self.alone or not (self.network.unsent or self.up.waits))
        self.network.tell_children({"type": peer_messages.END})
        self.network.close()

    def _wait_until(self, finished: Callable[[], bool]) -> None:
        end = time.monotonic() + self.max_wait
        self.pump()
        while not finished() and (left := end - time.monotonic()) > 0:
            self._sleep(left)
            self.pump()
        if not finished() and self.assembly is not None:
            for rank in self.position.children:
                self.assembly.finish(rank, peer_messages.ALL)
            self._pass_on_complete()

    def _sleep(self, left: float) -> None:
        """Wait for the connections, at most 0.1 s or the time left."""
        try:
            with new_selector() as selector:
                self.network.register(selector)
                if selector.get_map():
                    selector.select(min(left, 0.1))
                    return
        except (OSError, ValueError, KeyError) as error:  # a closed socket
            self.cut_off(error)
        time.sleep(min(left, 0.05))
