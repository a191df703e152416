"""Finds the addresses of tensors that lie in memory as they did when they were described.

Torch's methods take a third of a microsecond for each tensor. Where torch has the C functions of DLPack and there was a
compiler, it takes an eighth of one; elsewhere the methods are called.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from trainsentry.collectors.torch.rows.kernels.dense_tensors import EMPTY, is_dense
from trainsentry.collectors.torch.rows.local_tensor import address_in_memory

try:
    from trainsentry.collectors.native import host_rows
except ImportError:  # built without a compiler
    host_rows = None  # type: ignore[assignment]

_FUNCTIONS: Final[Any] = getattr(Tensor, "__dlpack_c_exchange_api__", None)
"""The capsule of DLPack's C functions, None where torch has none."""


def describe(tensors: Sequence[Tensor]) -> Any:
    """Describe plain tensors that can be read in place: type, shape, dtype and device of each, and that it is dense.

    None stands for tensors that cannot be described, of which no addresses can be found later.
    """
    try:
        if _DLPACK_TELLS:
            return host_rows.describe(_FUNCTIONS, tensors)
        return [_facts(x) for x in tensors]
    except RuntimeError:
        return None


def described_addresses(tensors: Sequence[Tensor], description: Any) -> list[int] | None:
    """Return the addresses of tensors that are all as described and have elements, else None.

    A tensor of another type, shape, dtype or device is not as described, nor is one that has gaps or a negative bit.
    """
    try:
        if _DLPACK_TELLS:
            addresses = host_rows.described_addresses(_FUNCTIONS, tensors, description, Tensor.is_neg)
        elif [_facts(x) for x in tensors] == description:
            addresses = [address_in_memory(x) for x in tensors]
        else:
            return None
    except RuntimeError:
        return None
    return None if addresses is None or 0 in addresses else addresses


def _facts(x: Tensor) -> tuple[Any, ...]:
    return type(x), x.shape, x.dtype, x.device, is_dense(x), x.is_neg()


def dlpack_tells_the_truth() -> bool:
    """Whether the compiled kernel and torch's C functions are here, and tell every change that matters."""
    if _FUNCTIONS is None or not hasattr(host_rows, "describe"):
        return False
    x = torch.zeros(2, 3, device="cpu")  # whatever the default device is
    differing = [
        x.t(),
        x.new_zeros(3, 2),
        x.new_zeros(6),
        x.new_zeros(2, 4)[:, :3],
        x.half(),
        x.bfloat16(),
        x.to("meta"),
        torch.nn.Parameter(x),
        torch._neg_view(x),
        x.to_sparse(),
    ]
    try:
        description = host_rows.describe(_FUNCTIONS, [x]) or b""
        found = [host_rows.described_address(_FUNCTIONS, y, description, Tensor.is_neg) for y in (x, *differing)]
        return found == [x.data_ptr(), *[None] * len(differing)]
    except Exception:  # noqa: BLE001 - what another version of torch raises
        return False


_DLPACK_TELLS: Final = dlpack_tells_the_truth()


def _compared_address(x: Tensor, description: Any, _is_negated: Any) -> int | None:
    addresses = described_addresses([x], description)
    return addresses[0] if addresses else None


compiled_share: Final[Callable[..., None] | None] = (
    partial(host_rows.share, _FUNCTIONS) if _DLPACK_TELLS and hasattr(host_rows, "share") else None
)
"""The compiled function that `shared_rows.py` asks for each activation, None where torch or a compiler lacks."""


compiled_read: Final[Callable[..., bool] | None] = (
    partial(host_rows.read_described, _FUNCTIONS) if _DLPACK_TELLS and hasattr(host_rows, "read_described") else None
)
"""Reads described tensors in host memory; see `collectors/native/host_rows.pyi`. None where `compiled_share` is."""


def _found_intact(tensors: Sequence[Tensor], versions: Sequence[int], addresses: Sequence[int]) -> list[bool]:
    waiting = zip(tensors, versions, addresses, strict=True)
    return [x._version == version and (x.data_ptr() or EMPTY) == address for x, version, address in waiting]


are_intact: Final[Callable[[Sequence[Tensor], Sequence[int], Sequence[int]], list[bool]]] = (
    partial(host_rows.are_intact, _FUNCTIONS) if compiled_share is not None else _found_intact
)
"""Tells of each tensor whether it has the count of changes and the address that it had (EMPTY without elements)."""

described_address: Final[Callable[[Tensor, Any, Any], int | None]] = (
    partial(host_rows.described_address, _FUNCTIONS) if _DLPACK_TELLS else _compared_address
)
"""Returns the address of a tensor that is as described, as the only one, else None or 0; the last argument is
`Tensor.is_neg`. It is asked for each activation, so nothing of Python stands around the compiled function."""
