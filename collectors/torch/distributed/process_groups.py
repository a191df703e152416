"""Patches the methods of process groups, so that a listener hears of every collective and its end.

Training code imports, wraps and copies the functions of `torch.distributed`; each of them ends in a method of a process
group, and waits for the `Work` that it returns. Those methods are patched on their classes while there are listeners.
The reducer of DistributedDataParallel calls from C++; its calls are intercepted in the dispatcher.
"""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from trainsentry.collectors.torch.distributed.reducer import called_from_python, watch_reducer


@dataclass(frozen=True)
class CollectiveOp:
    """A method of a process group: its public name, and the positions of its input and output arguments."""

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    point_to_point: bool = False

    @functools.cached_property
    def reduces(self) -> bool:
        """Whether the operation reduces over ranks."""
        return "reduce" in self.name


_BOTH: Final = ((0,), (0,))
_OUT_IN: Final = ((1,), (0,))

OPS: Final = {
    "allreduce": CollectiveOp("all_reduce", *_BOTH),
    "allreduce_coalesced": CollectiveOp("all_reduce_coalesced", *_BOTH),
    "broadcast": CollectiveOp("broadcast", *_BOTH),
    "reduce": CollectiveOp("reduce", *_BOTH),
    "allgather": CollectiveOp("all_gather", *_OUT_IN),
    "allgather_coalesced": CollectiveOp("all_gather_coalesced", *_OUT_IN),
    "_allgather_base": CollectiveOp("all_gather_into_tensor", *_OUT_IN),
    "all_gather_single": CollectiveOp("all_gather_into_tensor", *_OUT_IN),
    "allgather_into_tensor_coalesced": CollectiveOp("all_gather_into_tensor_coalesced", *_OUT_IN),
    "all_gather_single_coalesced": CollectiveOp("all_gather_into_tensor_coalesced", *_OUT_IN),
    "gather": CollectiveOp("gather", *_OUT_IN),
    "scatter": CollectiveOp("scatter", *_OUT_IN),
    "reduce_scatter": CollectiveOp("reduce_scatter", *_OUT_IN),
    "_reduce_scatter_base": CollectiveOp("reduce_scatter_tensor", *_OUT_IN),
    "reduce_scatter_single": CollectiveOp("reduce_scatter_tensor", *_OUT_IN),
    "reduce_scatter_tensor_coalesced": CollectiveOp("reduce_scatter_tensor_coalesced", *_OUT_IN),
    "reduce_scatter_single_coalesced": CollectiveOp("reduce_scatter_tensor_coalesced", *_OUT_IN),
    "alltoall": CollectiveOp("all_to_all", *_OUT_IN),
    "alltoall_base": CollectiveOp("all_to_all_single", *_OUT_IN),
    "all_to_all_single": CollectiveOp("all_to_all_single", *_OUT_IN),
    "send": CollectiveOp("send", (0,), (), point_to_point=True),
    "recv": CollectiveOp("recv", (), (0,), point_to_point=True),
    "recv_anysource": CollectiveOp("recv", (), (0,), point_to_point=True),
    "barrier": CollectiveOp("barrier", (), ()),
    "monitored_barrier": CollectiveOp("barrier", (), ()),
}
"""Methods by name, older and newer (torch 2.13) names of each; `_allgather_base` is public `all_gather_into_tensor`."""

FUNCTIONAL: Final = {
    "all_reduce": "all_reduce",
    "all_gather_tensor": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_tensor": "reduce_scatter_tensor",
    "all_to_all_single": "all_to_all_single",
    "broadcast": "broadcast",
    "permute_tensor": "permute_tensor",
}
"""Functional collectives, which DTensor uses: each takes a tensor and returns another."""


class CollectiveListener:
    """Is called for each collective, and overrides what it needs. Its methods contain their own failures."""

    def begin(self, op: CollectiveOp, group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called before a call; returns what `started` gets as `call`, or None to ignore the call."""

    def started(self, call: Any, work: Any, result: Any) -> None:
        """Called after a call has returned a `Work`, or its result."""

    def waiting(self, work: Any) -> None:
        """Called before the training code waits for a call."""

    def finished(self, work: Any) -> None:
        """Called when a call has ended for the current stream."""

    def coalescing(self, group: Any, *, begins: bool, work: Any) -> None:
        """Called where a group of calls that share one `Work` begins or ends."""

    def reducer_begins(self, op: CollectiveOp, args: tuple[Any, ...]) -> Any:
        """Called before a C++ call; `args` are tensors, the boxed group, and then a boxed reduction or others."""

    def reducer_started(self, call: Any) -> None:
        """Called after a C++ call was made."""

    def reducer_finished(self) -> None:
        """Called when the C++ calls made outside of a backward pass have ended."""


_listeners: list[CollectiveListener] = []
_patched: list[tuple[Any, str, Any]] = []
_undo: list[Callable[[], None]] = []
_NO_REDUCER: Final = contextlib.nullcontext()


def watch_calls(listener: CollectiveListener, *, reducer: bool = False) -> None:
    """Report every call from now on to `listener`; with `reducer`, also those of DistributedDataParallel's C++."""
    _listeners.append(listener)
    if reducer and not _undo:
        _undo.append(watch_reducer(_reducer_call))
        _patch(dist, "_broadcast_coalesced", _waits_for_reducer)
    if len(_listeners) > 1 or not dist.is_available():
        return
    from torch._C._distributed_c10d import ProcessGroup, Work
    from torch.distributed import _functional_collectives as functional

    for name, op in OPS.items():
        _patch(ProcessGroup, name, functools.partial(_method, op))
    _patch(ProcessGroup, "_start_coalescing", functools.partial(_coalescing, True))
    _patch(ProcessGroup, "_end_coalescing", functools.partial(_coalescing, False))
    _patch(Work, "wait", _wait)
    for name, public in FUNCTIONAL.items():
        _patch(functional, name, functools.partial(_function, CollectiveOp(public, (0,), ())))


def forget_calls(listener: CollectiveListener) -> None:
    """Report no more calls to `listener`; after the last one, restore every method."""
    _listeners[:] = [each for each in _listeners if each is not listener]
    if not _listeners:
        for owner, name, original in reversed(_patched):
            setattr(owner, name, original)
        _patched.clear()
        for undo in _undo:
            undo()
        _undo.clear()


def tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any], positions: tuple[int, ...]) -> list[Tensor]:
    """Return the tensors at the given positions of a call's arguments, including those in nested lists."""
    given = [*args, *kwargs.values()] if kwargs else args
    found: list[Tensor] = []
    stack = [given[i] for i in reversed(positions) if i < len(given)]
    while stack:
        value = stack.pop()
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            stack.extend(reversed(value))
    return found


def reduction_of(op: CollectiveOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return how a call reduces: 1 for a sum, 2 for an average, 0 for anything else."""
    if not op.reduces:
        return 0
    for given in (*args, *kwargs.values()):
        if isinstance(given, (Tensor, list, tuple)):
            continue
        how = getattr(given, "reduceOp", given)
        if isinstance(how, (dist.ReduceOp, dist.ReduceOp.RedOpType)):  # compared, as their names are slow to get
            return 1 if how == dist.ReduceOp.SUM else 2 if how == dist.ReduceOp.AVG else 0
        if isinstance(how, str) and how.lower() in {"sum", "avg"}:
            return 1 if how.lower() == "sum" else 2
    return 0


def members_of(group: Any) -> list[int]:
    """Return the ranks of a process group; empty when they are unknown."""
    try:
        c10d: Any = dist.distributed_c10d
        known = c10d._resolve_process_group(group) if isinstance(group, str) else _group_of_mesh(group)
        return list(dist.get_process_group_ranks(known))
    except (ValueError, RuntimeError, TypeError, KeyError, AttributeError):
        return []


def known_groups(own: str) -> list[dict[str, Any]]:
    """Return the process groups of this rank with their ranks, except the monitor's `own`."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    groups = getattr(dist.distributed_c10d, "_world").pg_names  # noqa: B009 - torch has no public list
    found = [{"name": group_name(group), "ranks": members_of(group)} for group in groups]
    return [group for group in found if group["name"] != own and group["ranks"]]


def group_name(group: Any) -> str:
    """Return the name of a process group, given as an object, a name, ranks or a mesh."""
    group = _group_of_mesh(group)
    name = getattr(group, "group_name", None)
    if isinstance(name, str):
        return "world" if name == "0" else name
    return "world" if group is None else str(group)


def _group_of_mesh(group: Any) -> Any:
    """Return the process group of a mesh of one dimension, or of a mesh and a dimension; anything else as it is."""
    if hasattr(group, "get_group") and getattr(group, "ndim", 1) == 1:
        return group.get_group()
    if isinstance(group, tuple) and len(group) == 2 and hasattr(group[0], "get_group"):
        return group[0].get_group(group[1])
    return group


def _patch(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    raw = vars(owner).get(name)  # the unbound attribute: a C++ class binds its methods by a wrapper of its own
    if raw is not None:
        _patched.append((owner, name, raw))
        setattr(owner, name, make(getattr(owner, name)))


def _method(op: CollectiveOp, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls = [(each, each.begin(op, self, args, kwargs)) for each in _listeners]
        with called_from_python() if _undo else _NO_REDUCER:
            work = original(self, *args, **kwargs)
        for listener, call in calls:
            if call is not None:
                listener.started(call, work, None)
        return work

    return method


def _function(op: CollectiveOp, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not isinstance(self, Tensor):
            return original(self, *args, **kwargs)
        group = next((a for a in (*args, *kwargs.values()) if not isinstance(a, (str, int, float, bool))), None)
        calls = [(each, each.begin(op, group, (self, *args), kwargs)) for each in _listeners]
        result = original(self, *args, **kwargs)
        for listener, call in calls:
            if call is not None:
                listener.started(call, None, result)
        return result

    return function


def _reducer_call(method: str, arguments: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    calls = [(each, each.reducer_begins(OPS[method], arguments)) for each in _listeners]
    result = make()
    for listener, call in calls:
        if call is not None:
            listener.reducer_started(call)
    return result


def _waits_for_reducer(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def broadcast_coalesced(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        for listener in _listeners:
            listener.reducer_finished()
        return result

    return broadcast_coalesced


def _wait(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        for listener in _listeners:
            listener.waiting(self)
        result = original(self, *args, **kwargs)
        for listener in _listeners:
            listener.finished(self)
        return result

    return wait


def _coalescing(begins: bool, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def coalescing(self: Any, *args: Any, **kwargs: Any) -> Any:
        work = original(self, *args, **kwargs)
        for listener in _listeners:
            listener.coalescing(self, begins=begins, work=work)
        return work

    return coalescing
