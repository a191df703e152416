"""Compares two dumps: the calls in both of them, their differences, and the first call that differs."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from trainsentry.anomaly.dumps.tensor_difference import Difference, of_facts, tolerance_of

MISSING, EXTRA, EQUAL, DIFFERS = "missing", "extra", "equal", "differs"


class TensorOfCall(Protocol):
    """A tensor of a call; see `exporters.dump_reader.DumpedTensor`."""

    @property
    def place(self) -> str:
        """Its place in the call, such as `input.0`."""

    @property
    def facts(self) -> dict[str, Any]:
        """Its recorded dtype, shape and statistics."""


class DumpedCalls(Protocol):
    """A dump; see `exporters.dump_reader.RankDump`."""

    @property
    def calls(self) -> dict[str, Any]:
        """The calls, in the order they ended."""

    def tensors(self, call: str) -> list[Any]:
        """The tensors of a call."""


@dataclass(frozen=True)
class Row:
    """One tensor of one call in both dumps, or a call that only one of them has (`status` missing or extra)."""

    call: str
    place: str
    status: str
    dtype: str = ""
    shape: str = ""
    difference: Difference | None = None

    @property
    def differs(self) -> bool:
        """Whether the dumps differ here."""
        return self.status == DIFFERS


Values = Callable[[Any, Any], Difference | None]
"""Compares the files of two tensors; None where one of them has none."""


def compare_dumps(
    a: DumpedCalls, b: DumpedCalls, names: Mapping[str, str], values: Values | None = None
) -> Iterator[Row]:
    """Yield the rows of a comparison, in the order in which the calls of `a` ended; then the calls only `b` has.

    `names` maps parts of names in `a` to parts of names in `b`, such as `Module.encoder` to `Module.module.encoder`.
    """
    seen = set()
    for call in a.calls:
        other = renamed(call, names)
        if other not in b.calls:
            yield Row(call, "", MISSING)
            continue
        seen.add(other)
        yield from _compare_call(call, a.tensors(call), {t.place: t for t in b.tensors(other)}, values)
    for call in b.calls:
        if call not in seen:
            yield Row(call, "", EXTRA)


def renamed(call: str, names: Mapping[str, str]) -> str:
    """Return the name that a call of one dump has in the other.

    >>> renamed("Module.fc.Linear.forward.0", {"Module.fc.": "Module.module.fc."})
    'Module.module.fc.Linear.forward.0'
    """
    for old, new in names.items():
        if call.startswith(old):
            return new + call[len(old) :]
    return call


def _compare_call(call: str, tensors: list[Any], others: dict[str, Any], values: Values | None) -> Iterator[Row]:
    for tensor in tensors:
        other = others.pop(tensor.place, None)
        dtype, shape = str(tensor.facts.get("dtype", "")), str(tensor.facts.get("shape", ""))
        if other is None:
            yield Row(call, tensor.place, MISSING, dtype, shape)
            continue
        found = values(tensor, other) if values is not None else None
        difference = found if found is not None else of_facts(tensor.facts, other.facts)
        coarser = max((dtype, str(other.facts.get("dtype", ""))), key=tolerance_of)
        yield Row(
            call, tensor.place, DIFFERS if difference.exceeds_rounding(coarser) else EQUAL, dtype, shape, difference
        )
    for place, other in others.items():
        yield Row(call, place, EXTRA, str(other.facts.get("dtype", "")), str(other.facts.get("shape", "")))
