"""Describes tensors for a dump, in msprobe's format."""

import math
import weakref
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from trainsentry.collectors.statistics import COLUMNS, INFS, MAX, MEAN, MIN, NANS, NORM
from trainsentry.collectors.torch.hooks.backward_pass import in_backward
from trainsentry.collectors.torch.rows.device_statistics import device_row
from trainsentry.collectors.torch.rows.host_statistics import PLAIN, address_of, host_row, read_at
from trainsentry.collectors.torch.rows.local_tensor import is_readable, local, stored_values, version_of

KEYS: Final = ("Max", "Min", "Mean", "Norm")

_READ: Final = INFS + 1
"""Leading columns of a row that are used: min, max, mean, norm, nans, infs."""

MAX_KNOWN: Final = 4096
"""Tensors whose facts are cached; then the cache is emptied, as a tensor recurs within a few calls."""


class TensorFacts:
    """Describes tensors; those on a device are read in one batch when `settle` is called.

    The output of one call is an input of the next, and an output of its module: a tensor that has not changed is not
    read again. Facts are cached only where autograd counts changes: results with a gradient, parameters until the next
    update (`forget`), and gradients within a backward pass. Data, buffers and constants may change uncounted.
    """

    def __init__(self, *, checksum: bool = False) -> None:
        self.checksum = checksum
        self._unsettled: list[tuple[dict[str, Any], Tensor]] = []
        self._known: dict[int, _Known] = {}
        self._row = np.zeros(COLUMNS)
        self._row_at = self._row.ctypes.data

    def describe(self, tensor: Tensor) -> dict[str, Any]:
        """Return type, dtype, shape, Max, Min, Mean, Norm and requires_grad of a tensor's part on this rank."""
        known = self._known_of(tensor)
        if known is not None:
            return {**known.facts, "requires_grad": tensor.requires_grad}
        facts = self._describe_plain(tensor) or self._describe(tensor)
        version = version_of(tensor)
        if version is not None and tensor.is_cpu and _keeps(tensor):
            if len(self._known) >= MAX_KNOWN:
                self.forget()
            self._known[id(tensor)] = _Known(weakref.ref(tensor), version, tensor.data_ptr(), facts)
            return dict(facts)
        return facts

    def file_of(self, tensor: Tensor) -> Path | None:
        """Return the file that already holds the same unchanged tensor; None when there is none."""
        known = self._known_of(tensor)
        return known.file if known is not None else None

    def note_file(self, tensor: Tensor, path: Path) -> None:
        """Note that a file holds a tensor."""
        known = self._known_of(tensor)
        if known is not None:
            known.file = path

    def forget(self) -> None:
        """Empty the cache: tensors may have changed, or another step begins, whose files lie elsewhere."""
        self._known.clear()

    def _known_of(self, tensor: Tensor) -> "_Known | None":
        known = self._known.get(id(tensor))
        if known is None or known.tensor() is not tensor or known.version != version_of(tensor):
            return None
        return known if known.address == tensor.data_ptr() else None

    def _describe_plain(self, tensor: Tensor) -> dict[str, Any] | None:
        """Return the facts of a contiguous host tensor of finite numbers, the usual case; None for any other."""
        address = address_of(tensor) if not self.checksum and tensor.numel() else 0
        if not address:
            return None
        read_at(address, tensor, 0.0, self._row_at)
        low, high, mean, norm, nans, infs = self._row.tolist()[:_READ]
        if nans or infs:
            return None
        return {
            "type": "torch.Tensor",
            "dtype": _name_of(tensor.dtype),
            "shape": list(tensor.shape),
            "Max": high,
            "Min": low,
            "Mean": mean,
            "Norm": norm,
            "requires_grad": tensor.requires_grad,
        }

    def _describe(self, tensor: Tensor) -> dict[str, Any]:
        part = local(tensor)
        facts: dict[str, Any] = {
            "type": _type_of(tensor),
            "dtype": _name_of(tensor.dtype),
            "shape": _shape_of(part),
            "Max": None,
            "Min": None,
            "Mean": None,
            "Norm": None,
            "requires_grad": tensor.requires_grad,
        }
        if part is not tensor and hasattr(tensor, "placements"):
            facts.update(_layout(tensor))
        if part.numel() and is_readable(part):
            self._read(part, facts)
        return facts

    def settle(self) -> None:
        """Fill in the statistics of tensors on devices, by one copy per device."""
        unsettled, self._unsettled = self._unsettled, []
        devices = {row.device for _, row in unsettled}
        for device in devices:
            rows = [(facts, row) for facts, row in unsettled if row.device == device]
            values = torch.stack([row for _, row in rows]).cpu().double().numpy()
            for (facts, _), row in zip(rows, values, strict=True):
                _fill(facts, row)

    def _read(self, part: Tensor, facts: dict[str, Any]) -> None:
        stored, implicit = stored_values(part)
        if not part.is_cpu:
            self._unsettled.append((facts, device_row(stored, 0.0, implicit)))
        elif _is_integral(stored):
            _fill_integral(facts, stored)
        else:
            row = host_row(stored, 0.0, implicit)
            if row[NANS] or row[INFS]:
                _fill_non_finite(facts, stored, row)
            else:
                _fill(facts, row)
        if self.checksum:
            facts["md5"] = checksum_of(stored)


@dataclass
class _Known:
    """The cached facts of a tensor, valid while it lives and has not changed."""

    tensor: "weakref.ref[Tensor]"
    version: int
    address: int
    facts: dict[str, Any]
    file: Path | None = None


def _keeps(tensor: Tensor) -> bool:
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided:
        return False
    if type(tensor) is nn.Parameter or tensor.grad_fn is not None or in_backward():
        return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # those have no address
    return False


def checksum_of(tensor: Tensor) -> str:
    """Return the CRC-32 of a tensor's bytes as 8 hexadecimal digits: msprobe calls it md5."""
    dense = tensor.resolve_conj().resolve_neg().contiguous().cpu()
    return f"{zlib.crc32(dense.reshape(-1).view(torch.uint8).numpy().data):08x}"


@cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype)


def _shape_of(tensor: Tensor) -> list[Any]:
    """Return the shape; a nested tensor has "*" or a symbol's name for each ragged dimension."""
    if tensor.is_nested and tensor.layout is torch.strided:
        return [tensor.size(0), *(["*"] * (tensor.dim() - 1))]
    return [n if isinstance(n, int) else str(n) for n in tensor.shape]


def _is_integral(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _fill(facts: dict[str, Any], row: Iterable[Any]) -> None:
    values = [float(x) for x in row]
    facts["Max"], facts["Min"] = values[MAX], values[MIN]
    facts["Mean"], facts["Norm"] = values[MEAN], values[NORM]
    if facts["dtype"].startswith("torch.complex"):
        facts["Norm"] = None
    if values[NANS] or values[INFS]:
        facts["Max_except_inf_nan"], facts["Min_except_inf_nan"] = values[MAX], values[MIN]
        infinite = math.nan if values[NANS] else math.inf
        facts["Max"] = facts["Norm"] = infinite
        facts["Min"] = facts["Mean"] = math.nan if values[NANS] else values[MIN]


def _fill_non_finite(facts: dict[str, Any], tensor: Tensor, row: Any) -> None:
    """Fill in the results of plain reductions, which may be NaN or Inf, and the extremes of the finite values."""
    wide = tensor.abs() if tensor.is_complex() else tensor.float()
    facts.update(Max=wide.max().item(), Min=wide.min().item(), Mean=wide.mean().item(), Norm=wide.norm().item())
    for key, column in (("Max_except_inf_nan", MAX), ("Min_except_inf_nan", MIN)):
        facts[key] = None if math.isnan(row[column]) else float(row[column])


def _fill_integral(facts: dict[str, Any], tensor: Tensor) -> None:
    if tensor.dtype is torch.bool:
        facts["Max"], facts["Min"] = bool(tensor.any()), bool(tensor.all())
    elif tensor.dtype in _NUMPY_INTEGERS:
        array = tensor.numpy()
        facts["Max"], facts["Min"] = int(array.max()), int(array.min())
    if tensor.dim() == 0:
        facts["Mean"] = facts["Norm"] = facts["Max"]


_NUMPY_INTEGERS: Final = frozenset(
    {
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    }
)


def _type_of(tensor: Tensor) -> str:
    if hasattr(tensor, "placements"):
        return "torch.distributed.tensor.DTensor"
    if isinstance(tensor, torch._subclasses.FakeTensor):
        return "torch._subclasses.fake_tensor.FakeTensor"
    return "torch.Tensor"


def _layout(tensor: Any) -> dict[str, Any]:
    """Return the mesh and the placements of a DTensor."""
    placements: list[dict[str, Any]] = []
    for placement in tensor.placements:
        if placement.is_shard():
            placements.append({"Shard": {"dim": placement.dim}})
        elif placement.is_replicate():
            placements.append({"Replicate": {}})
        else:
            placements.append({"Partial": {"reduce_op": str(getattr(placement, "reduce_op", "sum"))}})
    return {"device_mesh": tensor.device_mesh.mesh.tolist(), "placements": placements}
