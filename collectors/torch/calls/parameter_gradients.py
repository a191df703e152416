"""The gradients that one backward pass gives to a module's own parameters."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainsentry.collectors.guard import Guard

PART = "debugger"


class ParameterGradients:
    """Collects the gradients of one module's parameters; `done(gradients)` gets them by name once all have come."""

    def __init__(self, guard: Guard, began: Callable[[Any], None], done: Callable[[dict[str, Tensor]], None]) -> None:
        self.guard = guard
        self.began = began
        self.done = done
        self._gradients: dict[str, Tensor] = {}
        self._handles: dict[str, tuple[nn.Parameter, Any]] = {}

    def watch(self, module: nn.Module) -> None:
        """Watch the parameters that the module has now; those of FSDP are others in each forward pass."""
        for name, parameter in module.named_parameters(recurse=False):
            known = self._handles.get(name)
            if parameter.requires_grad and (known is None or known[0] is not parameter):
                if known is not None:
                    known[1].remove()
                self._handles[name] = (parameter, parameter.register_hook(_Arrived(self, name)))

    def take(self, name: str, gradient: Tensor) -> None:
        """Take one gradient."""
        if not self._gradients:
            self.began(self)
        self._gradients[name] = gradient
        if len(self._gradients) == len(self._handles):
            self.finish()

    def finish(self) -> None:
        """Hand over what has come."""
        gradients, self._gradients = self._gradients, {}
        if gradients:
            self.done(gradients)

    def close(self) -> None:
        """Remove the hooks."""
        for _, handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self._gradients.clear()


class _Arrived:
    def __init__(self, owner: ParameterGradients, name: str) -> None:
        self.owner = owner
        self.name = name

    def __call__(self, gradient: Tensor) -> None:
        with torch._C.DisableTorchFunction():
            self.owner.guard.run(PART, self.owner.take, self.name, gradient)
