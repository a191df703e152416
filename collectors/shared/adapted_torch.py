"""Recognises MSAdapter and mindtorch: packages that are called torch, and whose tensors are MindSpore's."""

import sys
from types import ModuleType


def adapted_torch() -> ModuleType | None:
    """Return the imported `torch` if it is provided by MindSpore, else None; nothing is imported."""
    torch = sys.modules.get("torch")
    tensor = getattr(torch, "Tensor", None)
    if torch is None or not isinstance(tensor, type):
        return None
    bases = {base.__module__.partition(".")[0] for base in tensor.__mro__}
    return torch if "mindspore" in bases else None
