"""Notes the form of training passes: shapes and dtypes of the inputs, autocast, modes, and how many a step has."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

STEADY: Final = 10
"""Steps in a row of one form, from which on it is the form of the run: sequences may vary in length, and the last batch
of an epoch in size."""


@dataclass(slots=True)
class PassForm:
    """The form of a step's passes through one outermost module: that of the first, and their number."""

    inputs: Sequence[tuple[str, tuple[int, ...], torch.dtype]]
    autocast: torch.dtype | None
    passes: int = 1


class PassForms:
    """The forms of this step's training passes and of the step before, by the name of the outermost module."""

    def __init__(self) -> None:
        self.now: dict[str, PassForm] = {}
        self._before: dict[str, PassForm] = {}
        self._alike = 0

    def open_step(self) -> None:
        """Begin a step."""
        if self.now:
            self._alike = self._alike + 1 if self.now == self._before else 0
            self._before, self.now = self.now, {}

    def note(self, name: str, inputs: Sequence[tuple[str, Tensor]]) -> None:
        """Note a training pass through an outermost module."""
        known = self.now.get(name)
        if known is not None:
            known.passes += 1
            return
        device = inputs[0][1].device.type if inputs else "cpu"
        self.now[name] = PassForm([(path, tuple(x.shape), x.dtype) for path, x in inputs], _autocast(device))

    def steady(self) -> Mapping[str, PassForm]:
        """Return the form of the last step; nothing where it was not that of the steps before it."""
        return self._before if self._alike >= STEADY else {}


def _autocast(device: str) -> torch.dtype | None:
    """Return the dtype of autocast for a type of device, None where it is off."""
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return None
    dtype: Any = torch.get_autocast_dtype(device)
    return dtype if isinstance(dtype, torch.dtype) else None


def switches_of(module: nn.Module) -> Any:
    """Return what programs switch on purpose: modes, which parameters are trained, and autocast."""
    modes: dict[nn.Module, bool] = {}
    parameters: dict[int, nn.Parameter] = {}
    waiting = [module]
    while waiting:  # `modules()` and `parameters()` make the names too, which takes four times as long
        inner = waiting.pop()
        if inner not in modes:
            modes[inner] = inner.training
            parameters.update({id(p): p for p in inner._parameters.values() if p is not None})
            waiting += [m for m in inner._modules.values() if m is not None]
    switched = tuple(modes.values()), sum([p.requires_grad for p in parameters.values()])
    device = next(iter(parameters.values())).device.type if parameters else "cpu"
    if not torch.amp.is_autocast_available(device):
        return switched
    return *switched, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
