"""Several ranks of MindSpore: each is watched by itself."""

from typing import Any

from trainsentry.collectors.mindspore.environment import rank_and_world_size


def meet() -> None:
    """Ranks do not meet: there is no exchange between them that does not wait for the device."""


def stands_alone() -> bool:
    """Return whether this rank is one of several, so that what is to happen on all at once cannot."""
    return rank_and_world_size()[1] > 1


def follow(model: Any, optimizer: Any, grad_scaler: Any, listener: Any) -> None:
    """Nothing is followed: ranks that are not watched have nothing to agree on."""
    del model, optimizer, grad_scaler, listener
