"""What a run is set to beside its tensors: names of settings, as checkpoints keep them."""

from collections.abc import Mapping
from typing import Any, Final

CLASS: Final = "class"
"""The class of a module, one of the framework's own layers."""

CONSTANT: Final = "constant."
"""Begins the name of a number that a module's class declares a constant: `constant.p`, `constant.eps`."""

MODE: Final = "mode"
"""Whether a module is in `training` or `evaluation` mode."""

TRAINED: Final = "trained"
"""Whether a parameter requires a gradient."""

OPTIMIZER: Final = "optimizer"
"""The class of an optimizer, by its number."""

INPUT: Final = "input"
"""Dtype and shape of an input of the model, where it has been the same for a while."""

PASSES: Final = "passes"
"""How many training passes a step has, where that has been the same for a while; by the outermost module."""

AUTOCAST: Final = "autocast"
"""The dtype of autocast in a training pass, or `off`; by the outermost module."""

WRITES: Final = "gradient writes"
"""How often gradients were written before an update beyond once a pass, every count there was: `0 1`. Clipping,
unscaling and casting write once more each."""

OPERATIONS: Final = "operations"
"""The operations of a module's forward pass and their numbers, `add 1, gelu 1`, where they were steady for a while."""

WRAPPED: Final = "wrapped"
"""The classes of the outermost modules, as of DDP or FSDP, which write gradients in their own ways."""

SOFTWARE: Final = "software"
"""The framework's version and the type of device, without which operations have other names."""

Settings = Mapping[str, Mapping[str, Any]]
"""Numbers, truth values and texts by the name of the setting, then by that of the module, parameter or input."""
