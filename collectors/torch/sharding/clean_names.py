"""Dotted names as the user's model gives them, whatever wraps it."""

from typing import Final

from torch import nn

from trainsentry.collectors.torch.sharding.registry import held_as, is_holder, name_parts

WRAPPERS: Final = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""Attributes under which a compiled or checkpointed module keeps the user's; they are no part of a user's name."""


class CleanNames:
    """Drops the parts of dotted names that wrappers added.

    >>> wrapped = nn.DataParallel(nn.Sequential(nn.Linear(1, 1)))
    >>> CleanNames(wrapped).of("module.0.weight")
    '0.weight'
    """

    def __init__(self, chunk: nn.Module) -> None:
        self._held_as = {raw: held_as(module) for raw, module in chunk.named_modules() if is_holder(module)}
        self._wrappers = WRAPPERS | name_parts()

    def of(self, raw: str) -> str:
        """Return the name without the wrappers' parts."""
        kept: list[str] = []
        path = ""
        for part in raw.split("."):
            if part not in self._wrappers and part != self._held_as.get(path):
                kept.append(part)
            path = f"{path}.{part}" if path else part
        return ".".join(kept)

    def is_inside(self, raw: str) -> bool:
        """Whether a module stands for one that is listed already: a compiler's or a checkpoint's inner module."""
        outer, _, part = raw.rpartition(".")
        return part in self._wrappers and outer not in self._held_as

    def is_holder(self, raw: str) -> bool:
        """Whether the module of this name is a wrapper that what it holds stands for."""
        return raw in self._held_as
