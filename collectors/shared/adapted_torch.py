"""Recognises MSAdapter and mindtorch, packages named `torch` whose tensors are MindSpore's."""

import sys
from types import ModuleType


def adapted_torch() -> ModuleType | None:
    """Return the imported `torch` if its tensors are MindSpore's, else None; import nothing."""
    torch = sys.modules.get("torch")
    tensor = getattr(torch, "Tensor", None)
    if torch is None or not isinstance(tensor, type):
        return None
    bases = {base.__module__.partition(".")[0] for base in tensor.__mro__}
    return torch if "mindspore" in bases else None
