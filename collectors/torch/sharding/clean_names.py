"""Dotted names as the user's model gives them, whatever wraps it."""

from typing import Final

from torch import nn

WRAPPERS: Final = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Names under which torch's own wrappers keep the module they wrap; they are no part of a user's name."""

HOLDERS: Final = frozenset(
    {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "DeepSpeedEngine", "PipelineEngine"}
)
"""Classes that wrap a user's model to distribute it: what they hold is observed in their place."""

HELD: Final = frozenset({"module", "_fsdp_wrapped_module"})
"""The names under which they keep it."""


def is_holder(module: nn.Module) -> bool:
    """Whether a module is a wrapper that distributes the model it holds."""
    return any(
        c.__name__ in HOLDERS and c.__module__.startswith(("torch.", "deepspeed.")) for c in type(module).__mro__
    )


class CleanNames:
    """Drops the parts of dotted names that wrappers added.

    >>> wrapped = nn.DataParallel(nn.Sequential(nn.Linear(1, 1)))
    >>> CleanNames(wrapped).of("module.0.weight")
    '0.weight'
    """

    def __init__(self, chunk: nn.Module) -> None:
        self._holders = {raw for raw, module in chunk.named_modules() if is_holder(module)}

    def of(self, raw: str) -> str:
        """Return the name without the wrappers' parts."""
        kept: list[str] = []
        path = ""
        for part in raw.split("."):
            if part not in WRAPPERS and not (part in HELD and path in self._holders):
                kept.append(part)
            path = f"{path}.{part}" if path else part
        return ".".join(kept)

    def is_inside(self, raw: str) -> bool:
        """Whether a module stands for one that is listed already: a compiler's or a checkpoint's inner module."""
        outer, _, part = raw.rpartition(".")
        return part in WRAPPERS and outer not in self._holders

    def is_holder(self, raw: str) -> bool:
        """Whether the module of this name is a wrapper that what it holds stands for."""
        return raw in self._holders
