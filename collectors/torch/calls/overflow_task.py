"""Records the calls that overflow, with their inputs before the call, and whether each made the overflow itself."""

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from trainsentry.collectors.calls.call import Call
from trainsentry.collectors.calls.dump_entries import EntryWriter
from trainsentry.collectors.torch.calls.tensor_facts import TensorFacts
from trainsentry.collectors.torch.calls.values import describe
from trainsentry.collectors.torch.rows.local_tensor import is_readable, local
from trainsentry.collectors.torch.saving import SUFFIX, save_tensor


class OverflowFlags(Protocol):
    """The overflow flag of a device in saturation mode, where results stay finite."""

    def clear(self) -> None:
        """Clear the flag."""

    def is_set(self) -> bool:
        """Whether an operation has overflowed since the last `clear`; waits for the device."""


class NpuFlags:
    """The overflow flag of an Ascend NPU."""

    def __init__(self, tools: Any) -> None:
        self._tools = tools

    def clear(self) -> None:
        """Clear the flag."""
        self._tools.clear_npu_overflow_flag()

    def is_set(self) -> bool:
        """Whether an operation has overflowed since the last `clear`."""
        return bool(self._tools.get_npu_overflow_flag())


def flags_of_device() -> OverflowFlags | None:
    """Return the flag of an NPU in saturation mode; None where an overflow shows in the results."""
    npu = sys.modules.get("torch_npu")
    tools = getattr(getattr(npu, "npu", None), "utils", None)
    if tools is None or tools.is_support_inf_nan():
        return None
    return NpuFlags(tools)


MADE: Final = "made"
PASSED_ON: Final = "passed_on"
UNSCALE: Final = "Torch._amp_foreach_non_finite_check_and_unscale_"
"""The operation by which a loss scaler finds an overflow, and then skips the step."""


class OverflowTask:
    """Counts overflowing calls in `calls`; `unscaled` says that a loss scaler found one in this step.

    A call overflows when its results hold NaN or Inf, or when the device's flag is set. It made the overflow itself
    when none of its inputs was NaN or Inf. Passing on an input's −Inf is no overflow: masks are made of −Inf.
    """

    def __init__(self, facts: TensorFacts, *, flags: OverflowFlags | None = None, save: bool = True) -> None:
        self.facts = facts
        self.flags = flags
        self.save = save
        self.writer: EntryWriter | None = None
        self.calls = 0
        self.first: str | None = None
        self.unscaled = False

    def before(self, call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Describe and copy the inputs, before the call can change them."""
        kept: list[tuple[Tensor, str]] = []
        stem = f"{call.name()}.input."
        content = {
            "input_args": self._describe(list(args), stem, kept),
            "input_kwargs": self._describe(dict(kwargs), stem, kept),
        }
        self.facts.settle()
        call.state = (content, kept)
        if self.flags is not None:
            self.flags.clear()

    def after(self, call: Call, output: Any, module: nn.Module | None) -> None:
        """Write the call if it has overflowed."""
        if call.state is None:
            return
        (content, kept), call.state = call.state, None
        flagged = self.flags is not None and self.flags.is_set()
        if call.stem == UNSCALE:
            self.unscaled |= bool(kinds_in(content["input_args"][:1]))
            return
        given = output if isinstance(output, tuple) else (output,)
        results: list[tuple[Tensor, str]] = []
        content["output"] = self._describe(list(given), f"{call.name()}.output.", results, copy=False)
        self.facts.settle()
        self._judge(call.name(), content, ("input_args", "input_kwargs"), "output", [*kept, *results], flagged)

    def gradient_arrived(self, call: Call, place: int, gradient: Tensor) -> Any:
        """Return the description of a gradient at an output, and the tensors to save for it."""
        kept: list[tuple[Tensor, str]] = []
        facts = self._describe(gradient, "", kept, copy=False, name=f"{call.name('backward')}.input.{place}")
        self.facts.settle()
        return facts, kept

    def gradients(self, call: Call, inputs: Sequence[Any], outputs: Sequence[Tensor | None]) -> None:
        """Write the backward pass of a call if it has overflowed."""
        name = call.name("backward")
        tensors = [pair for arrived in inputs if arrived is not None for pair in arrived[1]]
        content: dict[str, Any] = {
            "input": [None if arrived is None else arrived[0] for arrived in inputs],
            "output": self._describe(list(outputs), f"{name}.output.", tensors, copy=False),
        }
        self.facts.settle()
        self._judge(name, content, ("input",), "output", tensors, flagged=False)

    def parameter_gradients(self, name: str, gradients: Mapping[str, Tensor]) -> None:
        """Write the gradients of parameters if one has overflowed."""
        tensors: list[tuple[Tensor, str]] = []
        content = {p: [self._describe(g, "", tensors, copy=False, name=f"{name}.{p}")] for p, g in gradients.items()}
        self.facts.settle()
        if any(kinds_in(value) for value in content.values()):
            self._write(name, content, tensors, MADE, counts=False)

    def forget(self) -> None:
        """Forget what is known of tensors, so that each is read again."""
        self.facts.forget()

    def flush(self) -> None:
        """Do nothing: every entry is written at once."""

    def take_counts(self) -> tuple[int, str | None, bool]:
        """Return the number of overflowing calls, the first one, and whether a loss scaler found one; reset all."""
        found = (self.calls, self.first, self.unscaled)
        self.calls, self.first, self.unscaled = 0, None, False
        return found

    def _judge(
        self,
        name: str,
        content: dict[str, Any],
        input_keys: Sequence[str],
        output_key: str,
        tensors: list[tuple[Tensor, str]],
        flagged: bool,
    ) -> None:
        in_outputs = kinds_in(content[output_key])
        if not in_outputs and not flagged:
            return
        in_inputs = set().union(*(kinds_in(content[key]) for key in input_keys))
        if in_outputs == {-math.inf} and -math.inf in in_inputs and not flagged:
            return
        self._write(name, content, tensors, PASSED_ON if in_inputs else MADE)

    def _write(
        self, name: str, content: dict[str, Any], tensors: list[tuple[Tensor, str]], how: str, *, counts: bool = True
    ) -> None:
        if counts:
            self.calls += 1
            self.first = self.first or name
        if self.writer is None:
            return
        names = {}
        for tensor, stem in tensors if self.save else ():
            path = self.writer.tensor_path(f"{stem}{SUFFIX}")
            names[f"{stem}{SUFFIX}"] = path.name
            save_tensor(tensor, path)
        _rename_files(content, names)
        self.writer.entry(name, {**content, "overflow": how})

    def _describe(
        self, value: Any, stem: str, kept: list[tuple[Tensor, str]], *, copy: bool = True, name: str = ""
    ) -> Any:
        def take(tensor: Tensor, path: str) -> dict[str, Any]:
            facts = self.facts.describe(tensor)
            part = local(tensor)
            if self.save and part.layout is torch.strided and is_readable(part):
                file = name or f"{stem}{path}"
                facts["data_name"] = f"{file}{SUFFIX}"
                kept.append((part.clone() if copy else part, file))
            return facts

        return describe(value, "", take)


def _rename_files(described: Any, names: Mapping[str, str]) -> None:
    """Replace planned file names by the actual ones: the writer numbers long names."""
    if isinstance(described, dict):
        if "data_name" in described:
            described["data_name"] = names.get(described["data_name"], described["data_name"])
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
