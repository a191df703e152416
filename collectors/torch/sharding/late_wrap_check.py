"""Detects a model that was wrapped after `watch`, so that the watched model is not the one that trains."""

from typing import Any

import torch
from torch import nn

from trainsentry.collectors.guard import InertWhenCopied
from trainsentry.collectors.torch.sharding.registry import snapshots


class WrappedLate(ValueError):
    """A model was wrapped or sharded after it was given to `watch`."""


class LateWrapCheck(InertWhenCopied):
    """Forward pre-hook of a root: checks in the first pass that what runs is what was watched, and removes itself."""

    def __init__(self, chunk: nn.Module) -> None:
        self._snapshots = snapshots(chunk)
        self._handle = chunk.register_forward_pre_hook(self)

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Check once.

        Raises:
            WrappedLate: when the model was wrapped since.

        """
        if torch.compiler.is_compiling():
            return
        self.close()
        what = self._what_happened(module)
        if what:
            raise WrappedLate(
                f"watch(model): the model was given to {what} after watch(); allowed: wrap and shard it first, make "
                "the optimizer from what comes out, and then call watch(model, optimizer)"
            )

    def close(self) -> None:
        """Remove the hook."""
        self._handle.remove()

    def _what_happened(self, module: nn.Module) -> str:
        found = (sharding.wrapped_since(snapshot, module) for sharding, snapshot in self._snapshots)
        return next(filter(None, found), "")
