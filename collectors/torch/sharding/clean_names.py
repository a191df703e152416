"""Removes the parts that wrappers add to the names of a user's modules and parameters."""

from typing import Final

from torch import nn

from trainsentry.collectors.torch.sharding.registry import held_as, is_holder, name_parts

WRAPPERS: Final = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_forward_module"})
"""Attributes under which compiled and checkpointed modules, and Fabric, keep the user's module; names omit them."""


class CleanNames:
    """Removes the wrappers' parts from dotted names, and puts a prefix before them.

    >>> wrapped = nn.DataParallel(nn.Sequential(nn.Linear(1, 1)))
    >>> CleanNames(wrapped).of("module.0.weight")
    '0.weight'
    """

    def __init__(self, chunk: nn.Module, prefix: str = "") -> None:
        self._prefix = [prefix] if prefix else []
        self._held_as = {raw: held_as(module) for raw, module in chunk.named_modules() if is_holder(module)}
        self._wrappers = WRAPPERS | name_parts()

    def of(self, raw: str) -> str:
        """Return a name without the wrappers' parts, behind the prefix."""
        kept: list[str] = [*self._prefix]
        path = ""
        for part in raw.split(".") if raw else ():
            if part not in self._wrappers and part != self._held_as.get(path):
                kept.append(part)
            path = f"{path}.{part}" if path else part
        return ".".join(kept)

    def is_inside(self, raw: str) -> bool:
        """Whether a module is the inner module of a compiler's or checkpoint's wrapper, and so listed already."""
        outer, _, part = raw.rpartition(".")
        return part in self._wrappers and outer not in self._held_as

    def is_holder(self, raw: str) -> bool:
        """Whether the module of this name is a distributing wrapper, which its inner module represents."""
        return raw in self._held_as
