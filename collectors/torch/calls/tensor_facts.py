"""Describes tensors for a dump, in msprobe's format."""

import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from trainsentry.collectors.statistics import COLUMNS, INFS, NANS
from trainsentry.collectors.torch.calls.device_facts import DeviceFacts, Reading
from trainsentry.collectors.torch.calls.fact_values import (
    NUMPY_INTEGERS,
    fill,
    fill_integral,
    fill_non_finite,
    is_integral,
)
from trainsentry.collectors.torch.hooks.backward_pass import in_backward
from trainsentry.collectors.torch.rows.host_statistics import address_of, host_row, read_at
from trainsentry.collectors.torch.rows.local_tensor import (
    PLAIN,
    is_readable,
    local,
    storage_range,
    stored_values,
    version_of,
)

_READ: Final = INFS + 1
"""Leading columns of a row that are used: min, max, mean, norm, nans, infs."""

MAX_KNOWN: Final = 4096
"""Tensors whose facts are cached; then the cache is emptied, as a tensor recurs within a few calls."""


class TensorFacts:
    """Describes tensors; what lies on a device is filled in when `settle` is called.

    On a device tensors are read a while after they were described, with others, so `read_waiting` must be called
    before code that changes tensors.

    The output of one call is an input of the next, and an output of its module: a tensor that has not changed is not
    read again. Facts are cached only where autograd counts changes: results with a gradient, parameters until the next
    update (`forget`), and gradients within a backward pass. Data, buffers and constants may change uncounted.
    """

    def __init__(self, *, checksum: bool = False) -> None:
        self.checksum = checksum
        self._devices: dict[torch.device, DeviceFacts] = {}
        self._known: dict[int, _Known] = {}
        self._row = np.zeros(COLUMNS)
        self._row_at = self._row.ctypes.data

    def describe(self, tensor: Tensor) -> dict[str, Any]:
        """Return type, dtype, shape, Max, Min, Mean, Norm and requires_grad of a tensor's part on this rank."""
        known = self._known_of(tensor)
        if known is not None:
            return known.copy(tensor)
        reading: Reading = []
        facts = self._describe_plain(tensor) or self._describe(tensor, reading)
        version = version_of(tensor)
        if version is not None and _keeps(tensor):
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            known = _Known(weakref.ref(tensor), version, tensor.data_ptr(), facts, reading)
            self._known[id(tensor)] = known
            return known.copy(tensor)
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
        """Empty the cache: tensors may change, or another step begins, whose files lie elsewhere."""
        self.read_waiting()
        self._known.clear()

    def before_change(self, uncounted: Sequence[Tensor]) -> None:
        """Read what waits, as it may change from now on; forget tensors that change without autograd's count."""
        self.read_waiting()
        ranges = [storage_range(x) for x in uncounted]
        if ranges:
            gone = [key for key, known in self._known.items() if any(a <= known.address < b for a, b in ranges)]
            for key in gone:
                del self._known[key]

    def read_waiting(self) -> None:
        """Read what was described and not yet read: it may change from now on."""
        for device in self._devices.values():
            device.read_waiting()

    @property
    def is_settled(self) -> bool:
        """Whether every description is complete."""
        return not any(self._devices.values())

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

    def _describe(self, tensor: Tensor, reading: Reading) -> dict[str, Any]:
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
            self._read(part, facts, reading)
        return facts

    def settle(self) -> None:
        """Fill in the statistics of tensors on devices, by one copy per device."""
        for device in self._devices.values():
            if device:
                device.settle()

    def _read(self, part: Tensor, facts: dict[str, Any], reading: Reading) -> None:
        stored, implicit = stored_values(part)
        if not stored.is_cpu:
            reading.extend([facts])
            self._on_device(stored.device).read(stored, implicit, reading)
        elif is_integral(stored):
            _describe_integers(facts, stored)
        else:
            row = host_row(stored, 0.0, implicit)
            if row[NANS] or row[INFS]:
                fill_non_finite(facts, stored, row)
            else:
                fill(facts, row.tolist())
        if self.checksum:
            facts["md5"] = checksum_of(stored)

    def _on_device(self, device: torch.device) -> DeviceFacts:
        found = self._devices.get(device)
        if found is None:
            found = self._devices[device] = DeviceFacts(device)
        return found


@dataclass
class _Known:
    """The cached facts of a tensor, valid while it lives and has not changed; `reading` may yet complete them."""

    tensor: "weakref.ref[Tensor]"
    version: int
    address: int
    facts: dict[str, Any]
    reading: Reading = field(default_factory=list)
    file: Path | None = None

    def copy(self, tensor: Tensor) -> dict[str, Any]:
        """Return a copy of the facts, which is completed with them."""
        copied = {**self.facts, "requires_grad": tensor.requires_grad}
        if self.reading:
            self.reading.append(copied)
        return copied


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


def _describe_integers(facts: dict[str, Any], tensor: Tensor) -> None:
    if tensor.dtype is torch.bool:
        fill_integral(facts, bool(tensor.all()), bool(tensor.any()))
    elif tensor.dtype in NUMPY_INTEGERS:
        array = tensor.numpy()
        fill_integral(facts, int(array.min()), int(array.max()))


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
