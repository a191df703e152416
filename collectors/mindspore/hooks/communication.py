"""Records MindSpore's collectives and point-to-point operations: order, size, duration, inputs and outputs.

Their functions are patched while a step is sampled. Calls inside compiled code are not intercepted.
"""

import functools
import importlib
import inspect
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import mindspore as ms
from mindspore import Tensor

from trainsentry.collectors.calls.call_stacks import call_site, is_chosen
from trainsentry.collectors.guard import Guard
from trainsentry.collectors.mindspore.hooks.function_patches import Wrap, patch, unpatch
from trainsentry.collectors.mindspore.rows.step_rows import StepRows
from trainsentry.collectors.mindspore.runtime import wait
from trainsentry.collectors.series import COMMUNICATION_CALL, COMMUNICATION_INPUT, COMMUNICATION_OUTPUT, Series

PART: Final = "communication"
MAX_CALLS: Final = 256
"""Calls of one operation in one group recorded per step; `left_out` counts the rest."""

HOMES: Final = (
    "mindspore.mint.distributed",
    "mindspore.mint.distributed.distributed",
    "mindspore.communication.comm_func",
)
WORLD: Final = "world"
POINT_TO_POINT: Final = frozenset({"send", "recv", "isend", "irecv"})
_ASYNCHRONOUS: Final = frozenset({"isend", "irecv"})
"""As with `async_op`, only the program knows when the call ends, so its outputs are not read."""

REDUCTIONS: Final = {"sum": 1, "avg": 2}

_INPUTS: Final = frozenset({"tensor", "input", "input_tensor", "input_list", "input_tensor_list", "scatter_list"})
"""Names of input parameters."""
_OUTPUTS: Final = frozenset({"output", "output_tensor", "output_tensor_list", "tensor_list", "gather_list"})
"""Names of output parameters."""
_CHANGED: Final = frozenset({"all_reduce", "broadcast", "reduce"})
"""Operations whose `tensor` is both input and output."""
_FILLED: Final = frozenset({"recv", "irecv", "scatter"})
"""Operations whose `tensor` is only an output."""


@dataclass(frozen=True)
class CollectiveFunction:
    """A communication function: its name, its parameters, and which of them are inputs and outputs."""

    name: str
    parameters: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass
class _Call:
    op: str
    group: str
    name: str
    sequence: int
    began: float
    nbytes: int
    reduction: int
    seconds: float = float("nan")
    outputs: list[Tensor] = field(default_factory=list)


class CollectiveRows:
    """Records this thread's calls in sampled steps; `call_sites` are patterns over `<file>:<function>`."""

    def __init__(self, rows: StepRows, guard: Guard, call_sites: Sequence[str] = ("*",)) -> None:
        self.rows = rows
        self.guard = guard
        self.call_sites = tuple(call_sites)
        self.sites: dict[str, set[tuple[str, ...]]] | None = None
        self.left_out = 0
        self.members: dict[str, list[int]] = {WORLD: _members_of(WORLD)}
        self._thread = threading.get_ident()
        self._sequences: Counter[str] = Counter()
        self._in_step: Counter[tuple[str, str]] = Counter()
        self._recorded: list[_Call] = []
        self._undo: list[tuple[Any, str, Wrap]] = []
        self._inside = False

    @property
    def seconds_waited(self) -> float | None:
        """None (unknown): collectives run asynchronously."""
        return None

    def take_order(self) -> int | None:
        """Return None (unknown): collectives are intercepted only at sampled steps."""
        return None

    def doing(self) -> dict[str, Any]:
        """Return the collective that this rank waits for: unknown."""
        return {"waits_for": None, "call": None, "open": []}

    def open_step(self, *, sampling: bool) -> None:
        """Begin a step: patch the functions when `sampling`, else restore them."""
        self._in_step.clear()
        self._recorded.clear()
        if sampling and not self._undo:
            for op, owner in _functions():
                wrap = functools.partial(self._wrapped, op)
                patch(owner, op.name, wrap)
                self._undo.append((owner, op.name, wrap))
        elif not sampling:
            self.close()

    def end_step(self) -> None:
        """Append a row with the number, duration, bytes and group of each recorded call."""
        for call in self._recorded:
            members = () if call.op in POINT_TO_POINT else self.members.get(call.group, ())
            first = min(members, default=0)
            numbers = (call.sequence, call.seconds, call.nbytes, len(members), first, call.reduction)
            self.rows.add_numbers(self._series(call, COMMUNICATION_CALL, ""), numbers)

    def close(self) -> None:
        """Restore every patched function."""
        while self._undo:
            unpatch(*self._undo.pop())

    def groups(self) -> list[dict[str, Any]]:
        """Return the process groups seen so far, for `graph.json`."""
        return [{"name": name, "ranks": ranks} for name, ranks in self.members.items()]

    def _wrapped(self, op: CollectiveFunction, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self._inside or threading.get_ident() != self._thread:
                return function(*args, **kwargs)
            wait()  # raises errors of the program's own operations here, outside the guard
            given = {**dict(zip(op.parameters, args, strict=False)), **kwargs}
            call = self.guard.run(PART, self._begin, op, given)
            self._inside = True
            try:
                result = function(*args, **kwargs)
            finally:
                self._inside = False
            if call is not None and not given.get("async_op") and op.name not in _ASYNCHRONOUS:
                wait()  # for the outputs; outside the guard, as this is the program's own time
                self.guard.run(PART, self._end, op, call, given, result)
            return result

        return wrapper

    def _begin(self, op: CollectiveFunction, given: dict[str, Any]) -> _Call | None:
        group = _group_name(given.get("group"))
        kind = f"{group}.{op.name}" if op.name in POINT_TO_POINT else group
        sequence = self._sequences[kind]
        self._sequences[kind] += 1
        if "*" not in self.call_sites and not is_chosen(call_site(("mindspore",)), self.call_sites):
            return None
        number = self._in_step[group, op.name]
        self._in_step[group, op.name] += 1
        if number >= MAX_CALLS:
            self.left_out += 1
            return None
        if self.sites is not None:
            self.sites.setdefault(op.name, set()).add(call_site(("mindspore",))[1:])
        if group not in self.members:
            self.members[group] = _members_of(group)
        tensors = _tensors([given.get(name) for name in op.inputs])
        nbytes = sum(int(t.nbytes) for t in tensors)
        reduction = REDUCTIONS.get(str(given.get("op", "sum")).lower(), 0) if "op" in op.parameters else 0
        name = f"{group}.{op.name}.{number}"
        call = _Call(op.name, group, name, sequence, time.monotonic(), nbytes, reduction)
        self._recorded.append(call)
        self._read(call, COMMUNICATION_INPUT, tensors)
        return call

    def _end(self, op: CollectiveFunction, call: _Call, given: dict[str, Any], result: Any) -> None:
        outputs = _tensors([result]) or _tensors([given.get(name) for name in op.outputs])
        call.nbytes = max(call.nbytes, sum(int(t.nbytes) for t in outputs))
        call.seconds = time.monotonic() - call.began
        self._read(call, COMMUNICATION_OUTPUT, outputs)

    def _read(self, call: _Call, quantity: str, tensors: list[Tensor]) -> None:
        for i, tensor in enumerate(tensors):
            self.rows.add(self._series(call, quantity, str(i) if len(tensors) > 1 else ""), tensor)

    def _series(self, call: _Call, quantity: str, index: str) -> int:
        name = f"{call.name}.{index}" if index else call.name
        return self.rows.table.series_id(Series(name, quantity, 0, f"{call.op}|{call.group}|{call.name}"))


@functools.cache
def _functions() -> tuple[tuple[CollectiveFunction, Any], ...]:
    """Return the functions that take a group and tensors, each with its module."""
    found = []
    for path in HOMES:
        try:
            module = importlib.import_module(path)
        except ImportError:
            continue
        for name, function in sorted(vars(module).items()):
            if not inspect.isfunction(function) or name[0] == "_" or "object" in name:
                continue
            parameters = tuple(inspect.signature(function).parameters)
            inputs = tuple(p for p in parameters if p in _INPUTS and not (p == "tensor" and name in _FILLED))
            outputs = tuple(p for p in parameters if p in _OUTPUTS or (p == "tensor" and name in {*_FILLED, *_CHANGED}))
            if "group" in parameters and (inputs or outputs):
                found.append((CollectiveFunction(name, parameters, inputs, outputs), module))
    return tuple(found)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _group_name(group: Any) -> str:
    return WORLD if group is None or str(group).endswith("world_group") else str(group)


def _members_of(group: str) -> list[int]:
    """Return the ranks of a group; empty when they are unknown."""
    try:
        if group == WORLD:
            return list(range(int(ms.communication.get_group_size())))
        return [int(r) for r in ms.communication.get_process_group_ranks(group)]
    except (RuntimeError, ValueError, TypeError, AttributeError):
        return []
