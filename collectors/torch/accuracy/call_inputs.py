"""Builds the arguments of a dumped call: with the dumped tensors, or with random ones of the recorded range."""

import math
import pickle
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from trainsentry.collectors.calls.call_check import NotComparableError, UnusableCallError
from trainsentry.collectors.torch.saving import load_tensor

MAX_DEPTH: Final = 16
"""Nesting of lists in a call's entry at most."""

MAX_BYTES: Final = 8 << 30
"""Bytes of a random tensor at most: a damaged shape asks for more than any machine has."""


@dataclass(frozen=True)
class TensorSource:
    """Where tensors come from: `folder` holds the dumped ones, and is None for random ones drawn from `seed`."""

    folder: Path | None
    seed: int = 1234

    def generator(self, call: str) -> torch.Generator:
        """Return the generator of a call, which no other call's drawing shifts."""
        return torch.Generator().manual_seed(zlib.crc32(f"{self.seed}:{call}".encode()))


class InputBuilder:
    """Builds the values that one call's entry describes."""

    def __init__(self, call: str, source: TensorSource) -> None:
        self._source = source
        self._generator = source.generator(call)

    def build(self, described: Any, depth: int = 0) -> Any:
        """Return the value that a dump describes; lists and objects of values are built item by item.

        Raises:
            UnusableCallError: for tensors that are missing or damaged, and for values that no dump describes so.
            NotComparableError: for values that cannot be built anew, such as a process group.

        """
        if depth > MAX_DEPTH:
            raise UnusableCallError(f"its arguments are nested deeper than {MAX_DEPTH} levels")
        if described is None:
            return None
        if isinstance(described, list):
            return [self.build(item, depth + 1) for item in described]
        if not isinstance(described, Mapping):
            raise UnusableCallError(f"an argument is described by a {type(described).__name__}, expected an object")
        if "dtype" in described and "shape" in described:
            return self._tensor(described)
        if "type" in described:
            return _plain(described)
        return {str(key): self.build(item, depth + 1) for key, item in described.items()}

    def _tensor(self, facts: Mapping[str, Any]) -> Tensor:
        dtype = getattr(torch, str(facts["dtype"]).removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype):
            raise UnusableCallError(f"this torch has no dtype {facts['dtype']}")
        tensor = self._drawn(facts, dtype) if self._source.folder is None else self._loaded(facts, self._source.folder)
        if facts.get("requires_grad") is True and (tensor.is_floating_point() or tensor.is_complex()):
            tensor.requires_grad_()
        return tensor

    def _loaded(self, facts: Mapping[str, Any], folder: Path) -> Tensor:
        name = facts.get("data_name", facts.get("datapath"))
        if not isinstance(name, str):
            raise UnusableCallError("a tensor was not saved; --data random draws it")
        path = folder / Path(name).name
        try:
            return load_tensor(path)
        except FileNotFoundError:
            raise UnusableCallError(f"{path.name}: no such file") from None
        except (OSError, EOFError, RuntimeError, TypeError, ValueError, LookupError, pickle.UnpicklingError) as error:
            raise UnusableCallError(f"{path.name}: is no saved tensor ({_first_line(error)})") from None

    def _drawn(self, facts: Mapping[str, Any], dtype: torch.dtype) -> Tensor:
        shape = _shape(facts["shape"], dtype)
        if 0 in shape:
            return torch.empty(shape, dtype=dtype)
        low, high = _bound(facts, "Min"), _bound(facts, "Max")
        if dtype.is_complex:
            raise NotComparableError("takes complex tensors, whose range no dump records; --data real loads them")
        if dtype is torch.bool:
            return torch.randint(int(low > 0), int(high > 0) + 1, shape, generator=self._generator) > 0
        if not dtype.is_floating_point:
            return self._integers(low, high, shape, dtype)
        return self._floats(low, high, shape, dtype)

    def _integers(self, low: float, high: float, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        limits = torch.iinfo(dtype)
        if not limits.min <= low <= high <= limits.max:
            raise UnusableCallError(f"Min {low} and Max {high} are no range of {dtype}")
        above = min(int(high) + 1, torch.iinfo(torch.int64).max)
        drawn = torch.randint(int(low), above, shape, generator=self._generator).to(dtype)
        return _with_ends(drawn, int(low), int(high))

    def _floats(self, low: float, high: float, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Draw evenly from the finite part of the range; its ends are met, NaN and Inf among them."""
        if low > high:
            raise UnusableCallError(f"Min {low} exceeds Max {high}")
        most = torch.finfo(dtype).max
        bottom, top = (min(max(0.0 if math.isnan(x) else x, -most), most) for x in (low, high))
        unit = torch.rand(shape, generator=self._generator, dtype=torch.float64)
        return _with_ends((unit * (top - bottom) + bottom).to(dtype), low, high)


def _with_ends(tensor: Tensor, low: float, high: float) -> Tensor:
    """Put the recorded minimum first and the recorded maximum last."""
    flat = tensor.reshape(-1)
    flat[0], flat[-1] = low, high
    return flat.reshape(tensor.shape)


def _shape(value: Any, dtype: torch.dtype) -> tuple[int, ...]:
    known = isinstance(value, list) and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value)
    if not known:
        raise UnusableCallError(f"a shape is {value!r}, expected a list of sizes")
    if math.prod(value) * max(dtype.itemsize, 8) > MAX_BYTES:
        raise UnusableCallError(f"a tensor of shape {value} takes more than {MAX_BYTES} bytes")
    return tuple(value)


_TEXTS: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _bound(facts: Mapping[str, Any], name: str) -> float:
    value = facts.get(name)
    if isinstance(value, str):
        value = _TEXTS.get(value.lower())
    if not isinstance(value, (bool, int, float)):
        raise UnusableCallError(f"{name} of a tensor is {facts.get(name)!r}, expected a number: it cannot be drawn")
    return value


_OBJECTS: Final[dict[str, Callable[[Any], Any]]] = {
    "torch.device": lambda _: torch.device("cpu"),
    "torch.Size": torch.Size,
    "slice": lambda value: slice(*value),
    "ellipsis": lambda _: ...,
    "complex": complex,
}
"""Builds an object of each kind from its description; a device is placed anew."""

_NOT_REBUILT: Final = ("torch.ProcessGroup", "torch.distributed.ReduceOp", "torch.distributed.P2POp")


def _plain(described: Mapping[str, Any]) -> Any:
    """Return a value that is no tensor."""
    kind, value = str(described["type"]), described.get("value")
    if kind in _NOT_REBUILT:
        raise NotComparableError(f"takes a {kind}")
    if kind in ("torch.dtype", "torch.memory_format", "torch.layout"):
        return _of_torch(kind, value)
    if kind in _OBJECTS:
        try:
            return _OBJECTS[kind](value)
        except (TypeError, ValueError):
            raise UnusableCallError(f"a {kind} is {value!r}") from None
    if value is None or not isinstance(value, (bool, int, float, str)):
        raise NotComparableError(f"takes a {kind}, which cannot be built anew")
    return value


def _of_torch(kind: str, value: Any) -> Any:
    found = getattr(torch, str(value).removeprefix("torch."), None)
    if type(found).__name__ != kind.removeprefix("torch."):
        raise UnusableCallError(f"this torch has no {kind} {value!r}")
    return found


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
