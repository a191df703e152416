"""Detects a model that was wrapped after `watch`, which trains in place of the watched one."""

from typing import Any

import torch
from torch import nn

from trainsentry.collectors.guard import InertWhenCopied
from trainsentry.collectors.torch.sharding.registry import snapshots


class WrappedLate(ValueError):
    """A model was wrapped or sharded after `watch`."""


class LateWrapCheck(InertWhenCopied):
    """A forward pre-hook of a root; checks in the first pass that the watched model runs, then removes itself."""

    def __init__(self, chunk: nn.Module) -> None:
        self._snapshots = snapshots(chunk)
        self._handle = chunk.register_forward_pre_hook(self)

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Check once.

        Raises:
            WrappedLate: when the model was wrapped after `watch`.

        """
        if torch.compiler.is_compiling():
            return
        self.close()
        wrapper = self._late_wrapper(module)
        if wrapper:
            raise WrappedLate(
                f"watch(model): the model was given to {wrapper} after watch(); allowed: wrap and shard it first, "
                "create the optimizer from the wrapped model's parameters, then call watch(model, optimizer)"
            )

    def close(self) -> None:
        """Remove the hook."""
        self._handle.remove()

    def _late_wrapper(self, module: nn.Module) -> str:
        found = (sharding.wrapped_since(snapshot, module) for sharding, snapshot in self._snapshots)
        return next(filter(None, found), "")
