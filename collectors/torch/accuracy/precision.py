"""The better precision of a call: float64, or float32 for the half types, as msprobe's manual has it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from trainsentry.collectors.calls.both_sides import as_single

_HALF_TYPES: Final = frozenset({torch.float16, torch.bfloat16})

_BETTER: Final = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


@dataclass(frozen=True)
class Precision:
    """The dtype that a call's floating-point tensors are raised to; `single` says that the call itself is in float32.

    A call that mixes dtypes is raised to float64: float32 would not be better than its float32 results.
    """

    target: torch.dtype
    single: bool

    def raised(self, value: Any) -> Any:
        """Return an argument in the better precision.

        A device rounds the plain numbers of a float32 call to float32 (`x + 0.1`), so they are rounded here too, or the
        rounding of 0.1 would be taken for an error of the device.
        """
        if isinstance(value, Tensor):
            return self.tensor(value)
        if isinstance(value, torch.dtype):
            better = _BETTER.get(value)
            return value if better is None else torch.float64 if better is torch.float32 and self.single else better
        if isinstance(value, float) and self.single:
            return as_single(value)
        return value

    def tensor(self, value: Tensor) -> Tensor:
        """Return a tensor in the better precision, on the CPU."""
        value = value.detach().cpu()
        if value.is_complex():
            return value.to(torch.complex128)
        return value.to(self.target) if value.is_floating_point() else value.clone()


def better_precision(tensors: list[Tensor]) -> Precision:
    """Return the better precision of a call on these tensors."""
    dtypes = {t.dtype for t in tensors if t.is_floating_point() or t.is_complex()}
    only_half = bool(dtypes) and all(d in _HALF_TYPES or d.itemsize == 1 for d in dtypes)
    double = bool(dtypes & {torch.float64, torch.complex128})
    return Precision(torch.float32 if only_half else torch.float64, single=not only_half and not double)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make floating-point results of integer calls, such as `3 / 7`, in a dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
