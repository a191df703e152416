"""Records collectives and point-to-point operations: inputs, outputs, order and duration; lists the open ones."""

import threading
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch.distributed as dist
from torch import Tensor

from trainsentry.collectors.calls.call_stacks import call_site, is_chosen
from trainsentry.collectors.guard import Guard
from trainsentry.collectors.series import COMMUNICATION_CALL, COMMUNICATION_INPUT, COMMUNICATION_OUTPUT, Series
from trainsentry.collectors.torch.distributed.process_groups import (
    CollectiveListener,
    CollectiveOp,
    forget_calls,
    group_name,
    members_of,
    reduction_of,
    tensors_of,
    watch_calls,
)
from trainsentry.collectors.torch.distributed.reducer import ReducerCalls, group_of, reduction_in
from trainsentry.collectors.torch.hooks.backward_pass import in_backward
from trainsentry.collectors.torch.rows.step_rows import StepRows
from trainsentry.collectors.torch.sharding.registry import libraries

SIZED: Final = frozenset({"all_reduce", "broadcast"})
"""Operations whose buffers have the same size on every rank; those of others may differ."""


class CallOrder:
    """Folds the sequence of a step's collectives into a number below 2^32; 0 for none, None where it is unknown."""

    def __init__(self) -> None:
        self._number = 0
        self._is_known = True

    def add(self, op: str, group: str, reduction: int, nbytes: int) -> None:
        """Add the next call of a group that holds all ranks."""
        text = f"{op} {group} {reduction} {nbytes if op in SIZED else ''};"
        self._number = zlib.crc32(text.encode(), self._number)

    def lose(self) -> None:
        """Note a call of another thread: where it stands among the others differs from rank to rank."""
        self._is_known = False

    def take(self) -> int | None:
        """Return the number and reset it to 0."""
        number = self._number if self._is_known else None
        self._number, self._is_known = 0, True
        return number


PART = "communication"

MAX_CALLS: Final = 256
"""Calls of one operation in one group recorded per step; `left_out` counts the rest."""

POINT_TO_POINT: Final = frozenset({"send", "recv"})

MAX_OPEN: Final = 1024
"""Calls not yet waited for that are kept; the oldest are forgotten beyond that."""


@dataclass(slots=True)
class OpenCollective:
    """A call under way: its number in its group since watching began, and when it began (monotonic seconds)."""

    op: str
    group: str
    sequence: int
    began: float
    nbytes: int
    reduction: int = 0
    name: str = ""
    seconds: float = float("nan")
    outputs: list[Tensor] = field(default_factory=list)
    waited_since: float | None = None

    def describe(self) -> str:
        """Return the call as a message names it."""
        return f"{self.op} number {self.sequence} of group {self.group!r} ({self.nbytes} bytes)"


class CollectiveRows(CollectiveListener):
    """Records the calls of sampled steps; counts those of all steps, so that ranks agree on their numbers.

    `own` names the monitor's own group, which is left out. `call_sites` are shell-style patterns over
    `<file>:<function>` of the caller outside torch; other calls are counted but not recorded. With `reducer`, the calls
    of DistributedDataParallel's reducer are recorded too. `sites` collects the lines of each operation's callers, where
    it is not None.
    """

    def __init__(
        self, rows: StepRows, guard: Guard, own: str, call_sites: Sequence[str] = ("*",), *, reducer: bool = False
    ) -> None:
        self.rows = rows
        self.guard = guard
        self.own = own
        self.call_sites = tuple(call_sites)
        self.sampling = False
        self.sites: dict[str, set[tuple[str, ...]]] | None = None
        self.left_out = 0
        self.waiting_for: OpenCollective | None = None
        self.seconds_waited = 0.0
        self._sequences: Counter[str] = Counter()
        self._in_step: Counter[tuple[str, str]] = Counter()
        self._recorded: list[OpenCollective] = []
        self._open: dict[int, tuple[Any, list[OpenCollective]]] = {}
        self._coalesced: dict[str, list[OpenCollective]] = {}
        self._ids: dict[tuple[str, str], int] = {}
        self._members: dict[str, list[int]] = {}
        self._order = CallOrder()
        self._reducer = ReducerCalls(waits=self._reducer_waits, ended=self._end_of_reducer)
        self._thread = threading.get_ident()
        self._world = dist.get_world_size() if dist.is_initialized() else 1
        watch_calls(self, reducer=reducer)

    def open_step(self, *, sampling: bool) -> None:
        """Begin a step; record its calls when `sampling`."""
        self.sampling = sampling
        self._in_step.clear()
        for call in self._recorded:  # a call that ends later belongs to no step
            call.name, call.outputs = "", []
        self._recorded.clear()
        self._reducer.forget()  # a failed backward pass leaves calls whose end is never reported
        self._open = {key: (None, calls) for key, (_, calls) in self._open.items()}
        self.seconds_waited = 0.0

    def end_step(self) -> None:
        """Append a row with the number, duration, bytes and group of each recorded call."""
        for call in self._recorded:
            series = self._series(call, COMMUNICATION_CALL, "")
            members = () if call.op in POINT_TO_POINT else self._members.get(call.group, ())
            first = min(members, default=0)
            numbers = (call.sequence, call.seconds, call.nbytes, len(members), first, call.reduction)
            self.rows.add_numbers(series, numbers)

    def close(self) -> None:
        """Stop watching; restore every patched method."""
        forget_calls(self)
        self._reducer.forget()
        self._open.clear()
        self._recorded.clear()

    def take_order(self) -> int | None:
        """Return the order number of this step's collectives in groups of all ranks, and reset it.

        0 for none, and None in a step in which another thread called one, as PowerSGD's hook does.
        """
        return self._order.take()

    @property
    def calls_so_far(self) -> int:
        """Collectives and point-to-point operations called since watching began."""
        return sum(self._sequences.values())

    @property
    def open_calls(self) -> list[OpenCollective]:
        """Calls that have not ended, the oldest first."""
        return [*(call for _, calls in list(self._open.values()) for call in calls), *self._reducer.open]

    def doing(self) -> dict[str, Any]:
        """Return the call that this rank waits for, and the open calls; may be called from another thread."""
        call = self.waiting_for
        opened = [call.describe() for call in list(self.open_calls)]
        if call is None:
            return {"waits_for": None, "call": None, "open": opened}
        known = {"op": call.op, "group": call.group, "sequence": call.sequence}
        return {"waits_for": call.describe(), "call": known, "open": opened}

    # ------------------------------------------------------------------ called by the patched process groups

    def begin(
        self, op: CollectiveOp, group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> OpenCollective | None:
        """Number a call, and read its inputs. Calls of other threads (a checkpoint's) do not belong to the step."""
        if threading.get_ident() != self._thread and not in_backward():
            self.guard.run(PART, self._note_other_thread, group)
            return None
        found: OpenCollective | None = self.guard.run(PART, self._begin, op, group, args, kwargs)
        return found

    def started(self, call: OpenCollective, work: Any, result: Any) -> None:
        """Note a call's outputs; a call without a `Work` has ended, or its result is waited for when it is used."""
        self.guard.run(PART, self._started, call, work, result)

    def waiting(self, work: Any) -> None:
        """Note the call that this rank waits for."""
        self.guard.run(PART, self._waiting, work)

    def finished(self, work: Any) -> None:
        """Read the outputs of the calls that have ended."""
        self.guard.run(PART, self._finished, work)

    def coalescing(self, group: Any, *, begins: bool, work: Any) -> None:
        """Note where a group of calls that share one `Work` begins or ends."""
        self.guard.run(PART, self._coalescing, group, begins, work)

    def reducer_begins(self, op: CollectiveOp, args: tuple[Any, ...]) -> OpenCollective | None:
        """Number a call of the reducer, and read its inputs."""
        if threading.get_ident() != self._thread and not in_backward():
            return None
        found: OpenCollective | None = self.guard.run(PART, self._reducer_begins, op, args)
        return found

    def reducer_started(self, call: OpenCollective) -> None:
        """Note that the reducer has made a call; it ends when the backward pass has waited for it."""
        self.guard.run(PART, self._reducer.started, call)

    def reducer_finished(self) -> None:
        """Read the outputs of the calls that a forward pass made."""
        self.guard.run(PART, self._reducer.forward_ended)

    def _note_other_thread(self, group: Any) -> None:
        if group_name(group) != self.own:
            self._order.lose()

    def _reducer_begins(self, op: CollectiveOp, args: tuple[Any, ...]) -> OpenCollective | None:
        reduction = reduction_in(args[2]) if op.name == "all_reduce" else ""
        return self._begin(op, group_of(args[1]), (args[0], reduction), {})

    def _end_of_reducer(self, calls: list[OpenCollective]) -> None:
        self.guard.run(PART, self._end_waited, calls)

    def _reducer_waits(self, call: OpenCollective) -> None:
        self.waiting_for, call.waited_since = call, time.monotonic()

    def _end_waited(self, calls: list[OpenCollective]) -> None:
        if calls[0].waited_since is not None:
            self.seconds_waited += time.monotonic() - calls[0].waited_since
            self.waiting_for = None
        self._end(calls)

    def _begin(
        self, op: CollectiveOp, group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> OpenCollective | None:
        name = group_name(group)
        if name == self.own:
            return None
        kind = f"{name}.{op.name}" if op.point_to_point else name
        sequence = self._sequences[kind]
        self._sequences[kind] += 1
        tensors = tensors_of(args, kwargs, op.inputs)
        size = sum(x.numel() * x.element_size() for x in tensors)
        call = OpenCollective(op.name, name, sequence, time.monotonic(), size)
        if name not in self._members:
            self._members[name] = members_of(group)
        if not op.point_to_point:
            call.reduction = reduction_of(op, args, kwargs)
            if len(self._members[name]) == self._world:
                self._order.add(op.name, name, call.reduction, size)
        if self.sampling and self._is_chosen():
            number = self._in_step[name, op.name]
            self._in_step[name, op.name] += 1
            if number >= MAX_CALLS:
                self.left_out += 1
                return call
            call.name = f"{name}.{op.name}.{number}"
            call.outputs = tensors_of(args, kwargs, op.outputs)
            self._recorded.append(call)
            if self.sites is not None:
                self.sites.setdefault(op.name, set()).add(call_site(libraries())[1:])
            self._read(call, COMMUNICATION_INPUT, tensors)
        return call

    def _started(self, call: OpenCollective, work: Any, result: Any) -> None:
        if call.name and isinstance(result, Tensor):
            call.outputs = [result]
        call.nbytes = max(call.nbytes, sum(x.numel() * x.element_size() for x in call.outputs))
        coalesced = self._coalesced.get(call.group)
        if coalesced is not None:
            coalesced.append(call)
        elif work is None:
            self._end([call])
        else:
            self._keep(work, [call])

    def _keep(self, work: Any, calls: list[OpenCollective]) -> None:
        while len(self._open) >= MAX_OPEN:
            self._open.pop(next(iter(self._open)))
        # Only recorded calls keep the `Work` alive, until the step ends: many are never waited for in Python.
        self._open[id(work)] = (work if any(call.name for call in calls) else None, calls)

    def _waiting(self, work: Any) -> None:
        _, calls = self._open.get(id(work), (None, []))
        self.waiting_for = calls[0] if calls else None
        if calls and calls[0].waited_since is None:
            calls[0].waited_since = time.monotonic()

    def _finished(self, work: Any) -> None:
        _, calls = self._open.pop(id(work), (None, []))
        if calls and calls[0].waited_since is not None:
            self.seconds_waited += time.monotonic() - calls[0].waited_since
        self.waiting_for = None
        self._end(calls)

    def _end(self, calls: Sequence[OpenCollective]) -> None:
        for call in calls:
            call.seconds = time.monotonic() - call.began
            outputs, call.outputs = call.outputs, []
            if self.sampling and call.name:
                self._read(call, COMMUNICATION_OUTPUT, outputs)

    def _coalescing(self, group: Any, begins: bool, work: Any) -> None:
        name = group_name(group)
        if begins:
            self._coalesced[name] = []
            return
        calls = self._coalesced.pop(name, [])
        if calls and work is not None:
            self._keep(work, calls)
        else:
            self._end(calls)

    def _read(self, call: OpenCollective, quantity: str, tensors: list[Tensor]) -> None:
        for i, tensor in enumerate(tensors):
            self.rows.add(self._series(call, quantity, str(i) if len(tensors) > 1 else ""), tensor)

    def _series(self, call: OpenCollective, quantity: str, index: str) -> int:
        name = f"{call.name}.{index}" if index else call.name
        key = (name, quantity)
        found = self._ids.get(key)
        if found is None:
            series = Series(name, quantity, 0, f"{call.op}|{call.group}|{call.name}")
            found = self._ids[key] = self.rows.table.series_id(series)
        return found

    def _is_chosen(self) -> bool:
        return "*" in self.call_sites or is_chosen(call_site(libraries()), self.call_sites)
