"""Finds the collectors for a model's framework, and imports no framework that the user has not."""

from typing import Any

from trainsentry.collectors.backend import Framework
from trainsentry.collectors.shared.adapted_torch import adapted_torch


def framework_of(model: Any) -> Framework:
    """Return the framework of a model or of a list of model chunks.

    Raises:
        TypeError: for a model of an unsupported framework.

    """
    first = model[0] if isinstance(model, (list, tuple)) and model else model
    bases = {base.__module__.partition(".")[0] for base in type(first).__mro__}
    if "torch" in bases and adapted_torch() is None:
        from trainsentry.collectors.torch import backend as torch_backend

        return torch_backend
    if "mindspore" in bases:
        from trainsentry.collectors.mindspore import backend as mindspore_backend

        return mindspore_backend
    name = type(first).__name__
    raise TypeError(f"watch(model): got {name}, allowed: torch.nn.Module or mindspore.nn.Cell, or a list of them")
