"""Builds the arguments of a dumped call as torch's: tensors, dtypes, sizes."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from trainsentry.collectors.calls.call_check import NotComparableError, UnusableCallError
from trainsentry.collectors.calls.rebuilt_values import DrawnDtype, ValueBuilder, plain_value
from trainsentry.collectors.torch.saving import load_tensor

_OBJECTS: Final[dict[str, Callable[[Any], Any]]] = {
    "torch.device": lambda _: torch.device("cpu"),
    "torch.Size": torch.Size,
}
"""Builds an object of each kind of torch's from its description; a device is placed anew."""

_NOT_REBUILT: Final = ("torch.ProcessGroup", "torch.distributed.ReduceOp", "torch.distributed.P2POp")


class InputBuilder(ValueBuilder):
    """Builds the values that one call's entry describes, with torch's tensors on the CPU."""

    def tensor(self, facts: Mapping[str, Any]) -> Tensor:
        """Return the tensor that `facts` describe."""
        dtype = getattr(torch, str(facts["dtype"]).removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype):
            raise UnusableCallError(f"this torch has no dtype {facts['dtype']}")
        if self.draws:
            tensor = torch.from_numpy(self.drawn(facts, _drawn_dtype(dtype))).to(dtype)
        else:
            tensor = self.loaded(facts, load_tensor)
        if facts.get("requires_grad") is True and (tensor.is_floating_point() or tensor.is_complex()):
            tensor.requires_grad_()
        return tensor

    def plain(self, kind: str, described: Mapping[str, Any]) -> Any:
        """Return a value that is no tensor."""
        if kind in _NOT_REBUILT:
            raise NotComparableError(f"takes a {kind}")
        if kind in ("torch.dtype", "torch.memory_format", "torch.layout"):
            return _of_torch(kind, described.get("value"))
        return plain_value(kind, described, _OBJECTS)


def _drawn_dtype(dtype: torch.dtype) -> DrawnDtype:
    name, size = str(dtype), dtype.itemsize
    if dtype.is_complex or dtype is torch.bool:
        return DrawnDtype(name, "complex" if dtype.is_complex else "bool", size)
    if dtype.is_floating_point:
        return DrawnDtype(name, "float", size, torch.finfo(dtype).min, torch.finfo(dtype).max)
    return DrawnDtype(name, "integer", size, torch.iinfo(dtype).min, torch.iinfo(dtype).max)


def _of_torch(kind: str, value: Any) -> Any:
    found = getattr(torch, str(value).removeprefix("torch."), None)
    if type(found).__name__ != kind.removeprefix("torch."):
        raise UnusableCallError(f"this torch has no {kind} {value!r}")
    return found
