"""Builds the arguments of a dumped call as MindSpore's: tensors and dtypes."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import mindspore as ms
import numpy as np
from mindspore import Tensor

from trainsentry.collectors.calls.call_check import UnusableCallError
from trainsentry.collectors.calls.rebuilt_values import DrawnDtype, ValueBuilder, plain_value
from trainsentry.collectors.mindspore.saving import load_tensor

_LARGEST_BFLOAT16: Final = float.fromhex("0x1.fep127")

_KINDS: Final = {
    "bool": ms.bool_,
    **{n: getattr(ms, n) for n in ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]},
    **{n: getattr(ms, n) for n in ["float16", "float32", "float64", "bfloat16", "complex64", "complex128"]},
}
"""Dtypes by their name in lower case; dumps have `Float32`, MSAdapter's `torch.float32` too."""


def dtype_named(name: Any) -> Any:
    """Return a dtype of MindSpore by its name in a dump.

    Raises:
        UnusableCallError: when there is none.

    """
    found = _KINDS.get(str(name).rpartition(".")[2].lower())
    if found is None:
        raise UnusableCallError(f"MindSpore has no dtype {name}")
    return found


_OBJECTS: Final[dict[str, Callable[[Any], Any]]] = {
    "mindspore.dtype": dtype_named,
    "torch.dtype": dtype_named,
    "torch.Size": tuple,
    "tuple": tuple,
}
"""Builds an object of each kind of MindSpore's, or of MSAdapter's, from its description."""


class InputBuilder(ValueBuilder):
    """Builds the values that one call's entry describes, with MindSpore's tensors.

    A nested sequence becomes a tuple, which every operation takes; some take no list.
    """

    sequence = tuple

    def tensor(self, facts: Mapping[str, Any]) -> Tensor:
        """Return the tensor that `facts` describe."""
        dtype = dtype_named(facts["dtype"])
        if not self.draws:
            return as_dtype(self.loaded(facts, load_tensor), dtype)
        return as_dtype(Tensor(self.drawn(facts, _drawn_dtype(dtype))), dtype)

    def plain(self, kind: str, described: Mapping[str, Any]) -> Any:
        """Return a value that is no tensor."""
        return plain_value(kind, described, _OBJECTS)


def as_dtype(tensor: Tensor, dtype: Any) -> Tensor:
    """Return a tensor in a dtype; files hold bfloat16 as float32."""
    return tensor if tensor.dtype == dtype else tensor.astype(dtype)


def _drawn_dtype(dtype: Any) -> DrawnDtype:
    name = str(dtype)
    if dtype == ms.bool_:
        return DrawnDtype(name, "bool", 1)
    if dtype == ms.bfloat16:
        return DrawnDtype(name, "float", 2, -_LARGEST_BFLOAT16, _LARGEST_BFLOAT16)
    array = np.dtype(ms.dtype_to_nptype(dtype))
    if array.kind == "c":
        return DrawnDtype(name, "complex", array.itemsize)
    if array.kind == "f":
        limits = np.finfo(array)
        return DrawnDtype(name, "float", array.itemsize, float(limits.min), float(limits.max))
    whole = np.iinfo(array)
    return DrawnDtype(name, "integer", array.itemsize, int(whole.min), int(whole.max))
