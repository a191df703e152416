"""Records the calls that overflow, with their inputs before the call, and whether each made the overflow itself."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from trainsentry.collectors.calls.call import Call
from trainsentry.collectors.calls.dump_entries import EntryWriter
from trainsentry.collectors.torch.calls.call_arguments import may_change
from trainsentry.collectors.torch.calls.tensor_facts import TensorFacts
from trainsentry.collectors.torch.calls.values import describe
from trainsentry.collectors.torch.rows.local_tensor import is_readable, local, storage_range, version_of
from trainsentry.collectors.torch.saving import SUFFIX, save_tensor

MADE: Final = "made"
PASSED_ON: Final = "passed_on"
MOST_CALLS: Final = 256
"""Calls on a device that are judged together: the host waits once for all of them."""

MOST_BYTES: Final = 2**28
"""Bytes of tensors that calls keep in use until they are judged; most of them the backward pass keeps anyway."""

UNSCALE: Final = "Torch._amp_foreach_non_finite_check_and_unscale_"
"""The operation by which a loss scaler finds an overflow, and then skips the step."""


class OverflowFlags(Protocol):
    """The overflow flags of devices in saturation mode, where results stay finite."""

    def clear(self) -> None:
        """Clear the flags."""

    def is_set(self) -> bool:
        """Whether an operation has overflowed since the last `clear`; waits for devices that saturate."""

    def restore(self) -> None:
        """Set the flags again that have been set since the last `restore`."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A tensor to save if its call has overflowed, the stem of its file, and its version (None: it is a copy)."""

    tensor: Tensor
    stem: str
    version: int | None = None

    @property
    def is_intact(self) -> bool:
        """Whether it is as it was when it was kept."""
        return self.version is None or version_of(self.tensor) == self.version


@dataclass(frozen=True, slots=True)
class Unjudged:
    """A call whose values may not have arrived, or gradients of parameters (without `inputs`)."""

    name: str
    content: dict[str, Any]
    inputs: tuple[str, ...]
    outputs: str
    tensors: list[Kept]
    flagged: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that are kept for it."""
        return sum(kept.tensor.nbytes for kept in self.tensors)


class OverflowTask:
    """Counts overflowing calls in `calls`; `unscaled` says that a loss scaler found one in this step.

    A call overflows when its results hold NaN or Inf, or when the device's flag is set. It made the overflow itself
    when none of its inputs was NaN or Inf. Passing on an input's −Inf is no overflow: masks are made of −Inf. Calls on
    a device are judged together, `MOST_CALLS` at a time, as the host must wait for each verdict.
    """

    def __init__(self, facts: TensorFacts, *, flags: OverflowFlags | None = None, save: bool = True) -> None:
        self.facts = facts
        self.flags = flags
        self.save = save
        self.writer: EntryWriter | None = None
        self.calls = 0
        self.first: str | None = None
        self.unscaled = False
        self._unjudged: list[Unjudged] = []
        self._bytes = 0
        self._set = 0
        self._arrived: dict[str, int] = {}

    def before(self, call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Describe the inputs, and keep them: copies of what the call can change."""
        kept: list[Kept] = []
        stem = f"{call.name()}.input."
        copy = call.is_module or may_change(call.stem, args, kwargs)
        content = {
            "input_args": self._describe(list(args), stem, kept, copy=copy),
            "input_kwargs": self._describe(dict(kwargs), stem, kept, copy=copy),
        }
        call.state = (content, kept, self._times_set())

    def after(self, call: Call, output: Any, module: nn.Module | None) -> None:
        """Write the call if it has overflowed."""
        if call.state is None:
            return
        (content, kept, before), call.state = call.state, tuple(edge is not None for edge in call.edges)
        flagged = self._times_set() > before
        if call.stem == UNSCALE:
            self.facts.settle()
            self.unscaled |= bool(kinds_in(content["input_args"][:1]))
            return
        given = output if isinstance(output, tuple) else (output,)
        content["output"] = self._describe(list(given), f"{call.name()}.output.", kept)
        self._take(Unjudged(call.name(), content, ("input_args", "input_kwargs"), "output", kept, flagged))

    def gradient_arrived(self, call: Call, place: int, gradient: Tensor) -> Any:
        """Return the description of a gradient at an output, and the tensors to save for it."""
        kept: list[Kept] = []
        name = call.name("backward")
        facts = self._describe(gradient, "", kept, name=f"{name}.input.{place}")
        self._arrived[name] = self._times_set()  # of several outputs, the last one: then the call's own nodes run
        return facts, kept

    def gradients(self, call: Call, inputs: Sequence[Any], outputs: Sequence[Tensor | None]) -> None:
        """Write the backward pass of a call if it has overflowed.

        The flag counts from the last gradient at an output to those at the inputs. Where one of these is missing, the
        pass may have ended long ago, and its values alone are judged.
        """
        name = call.name("backward")
        whole = all(x is not None or not needed for x, needed in zip(outputs, call.state or (), strict=False))
        before = self._arrived.pop(name, None)
        flagged = self._times_set() > before if whole and before is not None else False
        tensors = [kept for arrived in inputs if arrived is not None for kept in arrived[1]]
        content: dict[str, Any] = {
            "input": [None if arrived is None else arrived[0] for arrived in inputs],
            "output": self._describe(list(outputs), f"{name}.output.", tensors),
        }
        self._take(Unjudged(name, content, ("input",), "output", tensors, flagged))

    def parameter_gradients(self, name: str, gradients: Mapping[str, Tensor]) -> None:
        """Write the gradients of parameters if one has overflowed."""
        tensors: list[Kept] = []
        content = {p: [self._describe(g, "", tensors, name=f"{name}.{p}")] for p, g in gradients.items()}
        self._take(Unjudged(name, content, (), "", tensors))

    def before_change(self, uncounted: Sequence[Tensor]) -> None:
        """Read what was described and not yet read, and copy what autograd will not tell to have changed."""
        self.facts.before_change(uncounted)
        written = {storage_range(x) for x in uncounted}
        for unjudged in self._unjudged if written else ():
            unjudged.tensors[:] = [
                Kept(kept.tensor.clone(), kept.stem)
                if kept.is_intact and storage_range(kept.tensor) in written
                else kept
                for kept in unjudged.tensors
            ]

    def forget(self) -> None:
        """Judge what was taken, and forget what is known of tensors, so that each is read again."""
        self._judge_all()
        self.facts.forget()
        self._arrived.clear()

    def flush(self) -> None:
        """Judge what was taken, and leave the devices' flags as a loss scaler would have found them."""
        self._judge_all()
        if self.flags is not None:
            self.flags.restore()

    def take_counts(self) -> tuple[int, str | None, bool]:
        """Return the number of overflowing calls, the first one, and whether a loss scaler found one; reset all."""
        self._judge_all()
        found = (self.calls, self.first, self.unscaled)
        self.calls, self.first, self.unscaled = 0, None, False
        return found

    def _times_set(self) -> int:
        """Return how often the flag has been found set, and leave it clear, so that a call is judged by itself.

        Counts are compared, as a call inside another one clears the flag too.
        """
        if self.flags is not None and self.flags.is_set():
            self._set += 1
            self.flags.clear()
        return self._set

    def _take(self, unjudged: Unjudged) -> None:
        """Judge a call, now if its values have arrived."""
        self._unjudged.append(unjudged)
        self._bytes += unjudged.nbytes
        if self.facts.is_settled or len(self._unjudged) >= MOST_CALLS or self._bytes >= MOST_BYTES:
            self._judge_all()

    def _judge_all(self) -> None:
        self.facts.settle()
        waiting, self._unjudged, self._bytes = self._unjudged, [], 0
        for unjudged in waiting:
            if unjudged.inputs:
                self._judge(unjudged)
            elif kinds_in(list(unjudged.content.values())):
                self._write(unjudged, MADE, counts=False)

    def _judge(self, call: Unjudged) -> None:
        in_outputs = kinds_in(call.content[call.outputs])
        if not in_outputs and not call.flagged:
            return
        in_inputs = set().union(*(kinds_in(call.content[key]) for key in call.inputs))
        if in_outputs == {-math.inf} and -math.inf in in_inputs and not call.flagged:
            return
        self._write(call, PASSED_ON if in_inputs else MADE)

    def _write(self, call: Unjudged, how: str, *, counts: bool = True) -> None:
        if counts:
            self.calls += 1
            self.first = self.first or call.name
        if self.writer is None:
            return
        names = {}
        for kept in call.tensors if self.save else ():
            if kept.is_intact:
                path = self.writer.tensor_path(f"{kept.stem}{SUFFIX}")
                names[f"{kept.stem}{SUFFIX}"] = path.name
                save_tensor(kept.tensor, path)
        _rename_files(call.content, names)
        self.writer.entry(call.name, {**call.content, "overflow": how})

    def _describe(self, value: Any, stem: str, kept: list[Kept], *, copy: bool = False, name: str = "") -> Any:
        def take(tensor: Tensor, path: str) -> dict[str, Any]:
            facts = self.facts.describe(tensor)
            part = local(tensor)
            if self.save and part.layout is torch.strided and is_readable(part):
                file = name or f"{stem}{path}"
                facts["data_name"] = f"{file}{SUFFIX}"
                kept.append(Kept(part.clone(), file) if copy else Kept(part, file, version_of(part)))
            return facts

        return describe(value, "", take)


def nonfinite(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return the names of those of named tensors whose parts on this rank hold NaN or Inf; waits for a device."""
    facts = TensorFacts()
    with torch.no_grad():
        described = [(name, facts.describe(tensor)) for name, tensor in tensors]
    facts.settle()
    return [name for name, description in described if kinds_in(description)]


def _rename_files(described: Any, names: Mapping[str, str]) -> None:
    """Replace planned file names by the actual ones, as the writer numbers long names; drop those of no file."""
    if isinstance(described, dict):
        planned = described.pop("data_name", None)
        if planned in names:
            described["data_name"] = names[planned]
        for value in described.values():
            _rename_files(value, names)
    elif isinstance(described, list):
        for item in described:
            _rename_files(item, names)


def kinds_in(described: Any) -> set[float]:
    """Return which of NaN (as 0), Inf and −Inf occur in a description.

    >>> sorted(kinds_in([{"Max": math.inf, "Min": 0.0}, {"type": "float", "value": -math.inf}]))
    [-inf, inf]
    """
    found: set[float] = set()
    stack = [described]
    while stack:
        item = stack.pop()
        if isinstance(item, list):
            stack.extend(item)
        elif isinstance(item, dict) and "Max" in item and "dtype" in item:
            found |= {_kind(item["Max"]), _kind(item["Min"])}
        elif isinstance(item, dict):
            stack.extend([item["value"]] if "value" in item and "type" in item else item.values())
        elif isinstance(item, float):
            found.add(_kind(item))
    return found - {1.0}


def _kind(value: Any) -> float:
    """Return 0 for NaN, the value itself for Inf and −Inf, and 1 for anything else."""
    if not isinstance(value, float) or math.isfinite(value):
        return 1.0
    return 0.0 if math.isnan(value) else value
