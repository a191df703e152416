"""Whole tensors of chosen modules: what a targeted dump writes."""

import math
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from trainsentry.collectors.guard import Guard
from trainsentry.collectors.statistics import MAX, MEAN, MIN, NORM
from trainsentry.collectors.torch.containers import tensors_in
from trainsentry.collectors.torch.host_statistics import host_row
from trainsentry.collectors.torch.inert_hook import InertWhenCopied
from trainsentry.collectors.torch.local_tensor import is_readable, local, stored_values
from trainsentry.collectors.torch.model_names import ModelNames
from trainsentry.collectors.torch.named import NamedModule
from trainsentry.collectors.torch.parameters import state_of

PART = "dump"


@dataclass(frozen=True)
class Piece:
    """One tensor of a dump: its entry in `dump.json`, the group inside the entry, its key, and its file name."""

    entry: str
    group: str
    key: str
    tensor: Tensor
    stack: tuple[str, ...] = ()

    @property
    def stem(self) -> str:
        """The name of the tensor's file, without the suffix, as msprobe 26.2 names it."""
        side = {"input_args": "input.", "input_kwargs": "input.", "parameters": "parameters."}
        plain = {"parameters_grad", "optimizer_state"}
        prefix = "" if self.group in plain else side.get(self.group, f"{self.group}.")
        return f"{self.entry}.{prefix}{self.key}"

    def describe(self) -> dict[str, Any]:
        """Return the tensor's description in msprobe's words."""
        held = local(self.tensor)
        if not is_readable(held):
            return {"type": "torch.Tensor", "dtype": str(held.dtype), "shape": list(held.shape)}
        stored, implicit = stored_values(held.cpu())
        row = [x if math.isfinite(x) else None for x in host_row(stored, 0.0, implicit)]  # null: JSON has no NaN
        return {
            "type": "torch.Tensor",
            "dtype": str(held.dtype),
            "shape": list(held.shape),
            "Max": row[MAX],
            "Min": row[MIN],
            "Mean": row[MEAN],
            "Norm": row[NORM],
            "requires_grad": self.tensor.requires_grad,
        }


class Capture:
    """Finds the tensors of chosen modules, now or in the coming forward and backward pass."""

    framework = "pytorch"

    def __init__(self, names: ModelNames, guard: Guard) -> None:
        self.names = names
        self.guard = guard
        self._handles: list[RemovableHandle] = []
        self._calls: dict[str, int] = {}

    def held(self, modules: Collection[str], optimizers: Sequence[Optimizer]) -> Iterator[Piece]:
        """Yield weights, gradients and optimizer state of the named modules' own parameters, as they stand."""
        by_name = {m.name: m for m in self.names.modules}
        for named in self.names.parameters:
            if named.module not in modules:
                continue
            stem = _stem(by_name[named.module])
            yield Piece(f"{stem}.forward.0", "parameters", named.leaf, named.part_of(named.parameter))
            if named.parameter.grad is not None:
                gradient = named.part_of(named.parameter.grad)
                yield Piece(f"{stem}.parameters_grad.0", "parameters_grad", named.leaf, gradient)
            for optimizer in optimizers:
                for path, tensor in tensors_in(state_of(optimizer).get(named.parameter, {})):
                    key = f"{named.leaf}.{path}"
                    like = tensor.numel() == named.parameter.numel()
                    part = named.part_of(tensor) if like else tensor
                    yield Piece(f"{stem}.optimizer_state.0", "optimizer_state", key, part)

    def attach(self, modules: Collection[str], taken: Callable[[Piece], None]) -> None:
        """Hand over inputs, outputs and their gradients of the named modules, each as it appears."""
        self._calls.clear()
        for named in self.names.modules:
            if named.name in modules:
                hook = _CaptureHook(self, named, taken)
                self._handles.append(named.module.register_forward_hook(hook, with_kwargs=True))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def take_call(self, named: NamedModule, call: tuple[Any, ...], taken: Callable[[Piece], None]) -> None:
        """Hand over the tensors of one call."""
        count = self._calls.get(named.name, 0)
        self._calls[named.name] = count + 1
        args, kwargs, output = call
        forward, backward = (f"{_stem(named)}.{way}.{count}" for way in ("forward", "backward"))
        stack = _stack()
        groups = (
            ("input_args", args, "output"),
            ("input_kwargs", kwargs, "output"),
            ("output", output, "input"),
        )
        for group, value, gradient_group in groups:
            for path, tensor in tensors_in(value):
                taken(Piece(forward, group, path, tensor, stack))
                if tensor.requires_grad and torch.is_grad_enabled():
                    hook = _GradientCapture(self, backward, gradient_group, path, taken)
                    handle = tensor.register_hook(hook)
                    if tensor.is_leaf:
                        self._handles.append(handle)

    @property
    def attached(self) -> bool:
        """Whether hooks are in place."""
        return bool(self._handles)


@dataclass(frozen=True, slots=True)
class _CaptureHook(InertWhenCopied):
    owner: Capture
    named: NamedModule
    taken: Callable[[Piece], None]

    def __call__(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.owner.guard.run(PART, self.owner.take_call, self.named, (args, kwargs, output), self.taken)


@dataclass(frozen=True, slots=True)
class _GradientCapture(InertWhenCopied):
    owner: Capture
    entry: str
    group: str
    key: str
    taken: Callable[[Piece], None]

    def __call__(self, gradient: Tensor) -> None:
        self.owner.guard.run(PART, self.taken, Piece(self.entry, self.group, self.key, gradient))


def _stem(named: NamedModule) -> str:
    kind = type(named.module).__name__
    return f"Module.{named.name}.{kind}" if named.name else f"Module.{kind}"


def _stack() -> tuple[str, ...]:
    """Return the calls that led here, the innermost first, without our own."""
    frames = [f for f in reversed(traceback.extract_stack()) if f.filename != __file__]
    return tuple(f"File {f.filename}, line {f.lineno}, in {f.name}, \n {f.line}" for f in frames)
