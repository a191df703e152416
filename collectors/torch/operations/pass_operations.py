"""Lists the operations of each module's forward pass, from the graph that autograd keeps for the backward pass.

The graph is there anyway: names, constants and sources of its nodes are read, and no values of activations. Of masks
and constant tables in host memory, if they are small, the elements are counted or summed. Nodes are numbered in the
order of their operations, so the numbers at which a module was entered and left tell which operations are its own.
"""

import ctypes
import math
import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainsentry.collectors.torch.rows.local_tensor import is_readable

MOST_OPERATIONS: Final = 20_000
"""Operations of a pass that are listed; a pass of more is left out, as it would take 0.1 s."""

MOST_CALLS: Final = 5_000
"""Calls of modules in a pass; a cell that is called for each token makes more."""

MOST_MASKED: Final = 1 << 20
"""Elements of a mask that are counted, some 30 µs; a larger mask has no count."""

MOST_SUMMED: Final = 1 << 16
"""Elements of a constant table that are summed, some 20 µs."""

OTHER: Final = "other"
FACTORS: Final = frozenset({"MulBackward0", "DivBackward0"})
"""Nodes that save as `other` by what a program multiplies or divides: a number, or a table as of rotary positions."""

MASKS: Final = frozenset({"_saved_mask", "_saved_condition", "_saved_attn_mask", "_saved_attn_bias"})
"""What nodes save of masks, of bools or not."""

PLACES: Final = frozenset({"EmbeddingBackward0", "IndexSelectBackward0", "GatherBackward0"})
"""Nodes that save, as `indices` or `index`, which rows were taken: positions are the same in each pass."""

CAST: Final = "ToCopyBackward0"
"""The node of a cast, which is only counted: autocast makes many of them."""

READ: Final = {
    torch.bool: np.bool_,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float32: np.float32,
    torch.float64: np.float64,
}
"""Dtypes of numbers, masks and tables that are read."""

NUMBERS_NODES: Final = hasattr(torch._C._autograd, "_get_sequence_nr")
"""Whether this torch tells the number that the next node gets; where it does not, nothing is listed."""

TELLS_HOOKS: Final = hasattr(torch._C._autograd.SavedTensor, "unpack_hook")
"""Whether this torch tells which saved tensors have hooks; where it does not, none is looked at."""

_LARGE: Final = 1 << 63
_ABSENT: Final = object()

Argument = None | bool | int | float | str | tuple[Any, ...]


class Operation(NamedTuple):
    """An operation: its node's name, where its inputs come from, and its constants by name.

    A source is the distance to an operation of the same module, such as -1, or the name of a sub-module, `weight` for a
    leaf of the graph, `input` for what comes from outside of the module, and `-` for what needs no gradient.
    """

    name: str
    sources: tuple[str | int, ...]
    arguments: tuple[tuple[str, Argument], ...]


_Reader = tuple[str, str, bool]
"""A constant's name, the attribute of the node that has it, and whether that holds a tensor."""


class _Call(NamedTuple):
    module: str
    begin: int
    end: list[int]


class PassOperations:
    """Notes when modules are entered and left in a pass, and lists their operations at its end."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._open: list[_Call] = []
        self._thread = 0
        self.casts: Counter[str] = Counter()
        self._kinds: dict[type, tuple[str, list[_Reader]]] = {}

    def begin(self) -> None:
        """Begin a pass; one that raised may have left modules entered."""
        self._calls.clear()
        self._open.clear()
        self._thread = threading.get_ident()

    def enter(self, module: str) -> None:
        """Note that a module is entered."""
        if self._thread != threading.get_ident():  # a replica of DataParallel: its nodes have numbers of their own
            self._thread = 0
        elif len(self._calls) < MOST_CALLS:
            call = _Call(module, torch._C._autograd._get_sequence_nr(), [])
            self._calls.append(call)
            self._open.append(call)
        else:
            self._thread = 0

    def leave(self) -> bool:
        """Note that the module entered last is left; return whether it was the outermost one."""
        if self._thread != threading.get_ident() or not self._open:
            return False
        self._open.pop().end.append(torch._C._autograd._get_sequence_nr())
        return not self._open

    def read(self, outputs: Iterable[Tensor]) -> dict[str, list[Operation]] | None:
        """Return the operations of each module that was called, in their order; None where they are too many.

        `casts` counts those of each module, which are not among them.
        """
        self.casts.clear()
        nodes = _nodes_behind(outputs, self._calls[0].begin) if self._calls else None
        if nodes is None:
            return None
        ordered = sorted(nodes.items(), key=_number_of)
        found: dict[str, list[Operation]] = {call.module: [] for call in self._calls}
        places: dict[Any, tuple[str, int]] = {}
        owners = self._owners([number for _, (number, _) in ordered])
        for (node, (_, sources)), module in zip(ordered, owners, strict=True):
            name, readers = self._kind(node)
            if name == CAST:
                self.casts[module] += 1
                continue
            own = found[module]
            place = len(own)
            places[node] = module, place
            of = tuple([_source(source, number, places, module, place) for source, number in sources])
            constants = _arguments(node, readers, sources) if readers else ()
            own.append(Operation(name, of, constants))
        return found

    def _kind(self, node: Any) -> tuple[str, list[_Reader]]:
        """Return the name of a node, and how its constants are read."""
        kind = type(node)
        known = self._kinds.get(kind)
        if known is None:
            known = node.name(), _readers_of(kind)
            if known[0] == kind.__name__:  # else kinds without a class of their own share one
                self._kinds[kind] = known
        return known

    def _owners(self, numbers: list[int]) -> list[str]:
        """Return the innermost module whose call made each node; calls are in the order in which they began."""
        owners, running, waiting = [], [], iter(self._calls)
        following = next(waiting, None)
        for number in numbers:
            while following is not None and following.begin <= number:
                running.append(following)
                following = next(waiting, None)
            while len(running) > 1 and running[-1].end and running[-1].end[0] <= number:
                running.pop()
            owners.append(running[-1].module)
        return owners


def _number_of(item: tuple[Any, tuple[int, Any]]) -> int:
    return item[1][0]


def _arguments(node: Any, readers: list[_Reader], sources: Any) -> tuple[tuple[str, Argument], ...]:
    """Return the constants of a node by name, without unpacking what hooks of saved tensors hold."""
    found = []
    for key, attribute, is_tensor in readers:
        if key == OTHER and is_tensor and sources[-1][0] is not None:
            continue  # it needs a gradient: no constant
        value = _of_tensor(getattr(node, attribute)) if is_tensor else _plain(getattr(node, attribute))
        if value is not _ABSENT:
            found.append((key, value))
    return tuple(found)


def _nodes_behind(outputs: Iterable[Tensor], begin: int) -> dict[Any, tuple[int, Any]] | None:
    """Return the nodes of a pass with their numbers and sources; None where they are too many."""
    found: dict[Any, tuple[int, Any]] = {}
    waiting: list[Any] = [output.grad_fn for output in outputs]
    while waiting:
        node = waiting.pop()
        if node is None or node in found:
            continue
        number = node._sequence_nr()
        if begin <= number < _LARGE:
            found[node] = number, (sources := node.next_functions)
            waiting += [source for source, _ in sources]
            if len(found) > MOST_OPERATIONS:
                return None
    return found


def _source(source: Any, number: int, places: dict[Any, tuple[str, int]], module: str, place: int) -> str | int:
    known = places.get(source)
    if known is None:
        if source is None:
            return "-"
        if source.name() == CAST:
            cast, number = source.next_functions[0]
            return _source(cast, number, places, module, place)
        return "weight" if source._sequence_nr() >= _LARGE else "input"
    owner, at = known
    name: str | int
    if owner == module:
        name = at - place
    elif not module or owner.startswith(f"{module}."):
        name = (owner[len(module) + 1 :] if module else owner).partition(".")[0]
    else:
        return "input"
    return f"{name}.{number}" if number else name


def _readers_of(kind: type) -> list[_Reader]:
    """Return the constants that nodes of a kind save: their name, their attribute, and whether it holds a tensor."""
    attributes = dir(kind)
    found = []
    for attribute in attributes:
        raw = f"_raw{attribute}"
        if not attribute.startswith("_saved_") or "_sym_" in attribute:
            continue
        if raw not in attributes:
            found.append((attribute.removeprefix("_saved_"), attribute, False))
            continue
        is_factor = kind.__name__ in FACTORS and attribute == f"_saved_{OTHER}"
        is_place = kind.__name__ in PLACES and attribute in {"_saved_indices", "_saved_index"}
        if TELLS_HOOKS and (attribute in MASKS or is_factor or is_place):
            found.append((attribute.removeprefix("_saved_"), raw, True))
    return found


def _of_tensor(saved: Any) -> Any:
    """Return the number that a saved tensor without axes holds, or the shape and the sum of another.

    Only what is in host memory is read. Hooks of saved tensors (checkpoints, offloading) may compute when a tensor is
    unpacked: what they hold is left out.
    """
    if saved.unpack_hook is not None:
        return _ABSENT
    tensor = saved.data
    if type(tensor) is not Tensor or not tensor.is_cpu or tensor.layout is not torch.strided:
        return _ABSENT
    if tensor.dtype not in READ or tensor.is_neg() or not is_readable(tensor):
        return _ABSENT
    if not 0 < tensor.numel() <= (MOST_MASKED if tensor.dtype is torch.bool else MOST_SUMMED):
        return _ABSENT
    return _plain(_array_of(tensor).item()) if tensor.ndim == 0 else _summed(_array_of(tensor))


def _summed(values: npt.NDArray[Any]) -> tuple[Any, ...]:
    """Return the shape and the sum of a table; of floats also how many are finite, as a mask to be added holds -Inf."""
    if values.dtype.kind != "f":
        return (*values.shape, int(values.sum(dtype=np.int64)))
    finite = np.isfinite(values)
    total = float(values.sum(dtype=np.float64, where=finite))
    return (*values.shape, int(finite.sum()), float(f"{total:.6g}"))


def _array_of(tensor: Tensor) -> npt.NDArray[Any]:
    """Return a tensor's memory as an array, by no operation that a profiler or a dispatch mode would see."""
    size = tensor.element_size()
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = memoryview((ctypes.c_char * ((last + 1) * size)).from_address(tensor.data_ptr()))
    strides = [stride * size for stride in tensor.stride()]
    found: npt.NDArray[Any] = np.ndarray(tuple(tensor.shape), READ[tensor.dtype], memory, strides=strides)
    return found


def _plain(value: Any) -> Any:
    """Return a constant as something that equals itself: no NaN, and negative numbers as such."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, int):
        return value - 2 * _LARGE if value >= _LARGE else value
    if isinstance(value, float):
        return "nan" if math.isnan(value) else value
    if isinstance(value, tuple):
        return tuple(_plain(x) for x in value)
    return _ABSENT
