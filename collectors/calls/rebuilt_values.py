"""Builds the values that a dump describes: dumped tensors, or random ones of the recorded range, drawn with NumPy.

A framework adds what only it knows: its dtypes, its tensors, and its objects that are no tensors.
"""

import math
import pickle
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trainsentry.collectors.calls.call_check import NotComparableError, UnusableCallError

MAX_DEPTH: Final = 16
"""Nesting of lists in a call's entry at most."""

MAX_BYTES: Final = 8 << 30
"""Bytes of a random tensor at most: a damaged shape asks for more than any machine has."""


@dataclass(frozen=True)
class TensorSource:
    """Where tensors come from: `folder` holds the dumped ones, and is None for random ones drawn from `seed`."""

    folder: Path | None
    seed: int = 1234

    def generator(self, call: str) -> np.random.Generator:
        """Return the generator of a call, which no other call's drawing shifts."""
        return np.random.default_rng(zlib.crc32(f"{self.seed}:{call}".encode()))


@dataclass(frozen=True)
class DrawnDtype:
    """A dtype to draw: `kind` is bool, integer, float or complex, `lowest` and `highest` are its finite limits."""

    name: str
    kind: str
    itemsize: int
    lowest: float = 0
    highest: float = 0


class ValueBuilder(ABC):
    """Builds the values that one call's entry describes."""

    sequence: Callable[[list[Any]], Any] = list
    """Makes the nested sequences of arguments, whose kind no dump records."""

    def __init__(self, call: str, source: TensorSource) -> None:
        self._source = source
        self._generator = source.generator(call)

    @abstractmethod
    def tensor(self, facts: Mapping[str, Any]) -> Any:
        """Return the tensor that `facts` describe, by `loaded` or by `drawn`."""

    @abstractmethod
    def plain(self, kind: str, described: Mapping[str, Any]) -> Any:
        """Return a value that is no tensor, by `plain_value` if the framework has no such kind of its own."""

    def build(self, described: Any) -> Any:
        """Return the value that a dump describes; lists and objects of values are built item by item.

        Raises:
            UnusableCallError: for tensors that are missing or damaged, and for values that no dump describes so.
            NotComparableError: for values that cannot be built anew, such as a process group.

        """
        return [self._built(item, 1) for item in described] if isinstance(described, list) else self._built(described)

    def _built(self, described: Any, depth: int = 0) -> Any:
        if depth > MAX_DEPTH:
            raise UnusableCallError(f"its arguments are nested deeper than {MAX_DEPTH} levels")
        if described is None:
            return None
        if isinstance(described, list):
            return type(self).sequence([self._built(item, depth + 1) for item in described])
        if not isinstance(described, Mapping):
            raise UnusableCallError(f"an argument is described by a {type(described).__name__}, expected an object")
        if "dtype" in described and "shape" in described:
            return self.tensor(described)
        if "type" in described:
            return self.plain(str(described["type"]), described)
        return {str(key): self._built(item, depth + 1) for key, item in described.items()}

    @property
    def draws(self) -> bool:
        """Whether tensors are drawn, not loaded."""
        return self._source.folder is None

    def loaded(self, facts: Mapping[str, Any], load: Callable[[Path], Any]) -> Any:
        """Return a dumped tensor, read by `load`.

        Raises:
            UnusableCallError: when there is none, or its file holds something else.

        """
        name = facts.get("data_name", facts.get("datapath"))
        if not isinstance(name, str) or self._source.folder is None:
            raise UnusableCallError("a tensor was not saved; --data random draws it")
        path = self._source.folder / Path(name).name
        try:
            return load(path)
        except FileNotFoundError:
            raise UnusableCallError(f"{path.name}: no such file") from None
        except (OSError, EOFError, RuntimeError, TypeError, ValueError, LookupError, pickle.UnpicklingError) as error:
            text = (str(error).splitlines() or [type(error).__name__])[0]
            raise UnusableCallError(f"{path.name}: is no saved tensor ({text})") from None

    def drawn(self, facts: Mapping[str, Any], dtype: DrawnDtype) -> NDArray[Any]:
        """Return values of the recorded shape and range: booleans, int64 or float64, to be converted to the dtype.

        Raises:
            UnusableCallError: for a shape or a range that is none.
            NotComparableError: for complex tensors.

        """
        shape = _shape(facts["shape"], dtype)
        if 0 in shape:
            return np.zeros(shape)
        low, high = _bound(facts, "Min"), _bound(facts, "Max")
        if dtype.kind == "complex":
            raise NotComparableError("takes complex tensors, whose range no dump records; --data real loads them")
        if dtype.kind == "bool":
            return self._generator.integers(int(low > 0), int(high > 0) + 1, shape) > 0
        if dtype.kind == "integer":
            return self._integers(low, high, shape, dtype)
        return self._floats(low, high, shape, dtype)

    def _integers(self, low: float, high: float, shape: tuple[int, ...], dtype: DrawnDtype) -> NDArray[Any]:
        if not dtype.lowest <= low <= high <= dtype.highest:
            raise UnusableCallError(f"Min {low} and Max {high} are no range of {dtype.name}")
        above = min(int(high), np.iinfo(np.int64).max)
        return _with_ends(self._generator.integers(int(low), above, shape, endpoint=True), int(low), above)

    def _floats(self, low: float, high: float, shape: tuple[int, ...], dtype: DrawnDtype) -> NDArray[Any]:
        """Draw evenly from the finite part of the range; its ends are met, NaN and Inf among them."""
        if low > high:
            raise UnusableCallError(f"Min {low} exceeds Max {high}")
        bottom, top = (min(max(0.0 if math.isnan(x) else x, dtype.lowest), dtype.highest) for x in (low, high))
        unit = self._generator.random(shape)
        return _with_ends(np.asarray(unit * top + (1.0 - unit) * bottom), low, high)


def _with_ends(array: NDArray[Any], low: float, high: float) -> NDArray[Any]:
    """Put the recorded minimum first and the recorded maximum last."""
    flat = array.reshape(-1)
    flat[0], flat[-1] = low, high
    return flat.reshape(array.shape)


def _shape(value: Any, dtype: DrawnDtype) -> tuple[int, ...]:
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
    "slice": lambda value: slice(*value),
    "ellipsis": lambda _: ...,
    "complex": complex,
}
"""Builds an object of each kind from its description."""


def plain_value(
    kind: str, described: Mapping[str, Any], objects: Mapping[str, Callable[[Any], Any]] | None = None
) -> Any:
    """Return a number, a text, or an object of Python or of `objects`, a framework's own kinds.

    Raises:
        UnusableCallError: for an object whose description is damaged.
        NotComparableError: for any other kind.

    """
    value = described.get("value")
    make = {**_OBJECTS, **(objects or {})}.get(kind)
    if make is not None:
        try:
            return make(value)
        except (TypeError, ValueError):
            raise UnusableCallError(f"a {kind} is {value!r}") from None
    if value is None or not isinstance(value, (bool, int, float, str)):
        raise NotComparableError(f"takes a {kind}, which cannot be built anew")
    return value


def arguments_of(
    builder: ValueBuilder, forward: Mapping[str, Any], backward: Mapping[str, Any] | None
) -> tuple[list[Any], dict[str, Any], list[Any] | None]:
    """Return the arguments of a call, and the gradients at its outputs (None for no backward pass).

    Raises:
        UnusableCallError, NotComparableError: as `ValueBuilder.build`.

    """
    args = builder.build(forward.get("input_args", forward.get("args", [])))
    kwargs = builder.build(forward.get("input_kwargs", forward.get("kwargs", {})))
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise UnusableCallError("its entry holds no list of arguments")
    gradients = builder.build(backward.get("input", [])) if backward is not None and "out" not in kwargs else None
    if gradients is not None and not isinstance(gradients, list):
        raise UnusableCallError("its entry holds no list of gradients")
    return args, kwargs, gradients


def split_name(call: str) -> tuple[str, str]:
    """Return prefix and operation of a call such as `Functional.linear.0`.

    Raises:
        UnusableCallError: for a name of another form.

    """
    parts = call.split(".")
    if len(parts) < 3 or not all(parts):
        raise UnusableCallError("is no name of a call, such as Functional.linear.0")
    return parts[0], ".".join(parts[1:-1])
