"""Tensors that the fused kernels read in place: their addresses, their sizes, and how each dtype of them is cut."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainsentry.collectors.torch.rows.kernels.chunks import MOST_AT_ONCE, Cut, cut
from trainsentry.collectors.torch.rows.local_tensor import LOW, address_in_memory

FLOATS: Final = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Dtypes that the kernels read on every device."""

WHOLE_NUMBERS: Final = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool})
"""Dtypes that the kernels read too where they sum in float64, which holds such numbers exactly up to 2⁵³."""

EMPTY: Final = -1
"""The address of a tensor without elements."""


@dataclass(frozen=True, eq=False, slots=True)
class DtypeGroup:
    """The tensors of one dtype in a list, which one launch reads: their `places` in the list, and how they are cut.

    `places` has shape (n,); `whole` says that they are all places. Two groups are equal if they are the same object, so
    that what was made for a group is found again where its list recurs.
    """

    places: npt.NDArray[np.int64]
    cutting: Cut
    whole: bool


def groups_of_dtypes(dtypes: Sequence[torch.dtype], sizes: Sequence[int]) -> list[DtypeGroup]:
    """Return the groups of a list of tensors, of which there are at most `MOST_AT_ONCE`."""
    places: dict[torch.dtype, list[int]] = {}
    for i, dtype in enumerate(dtypes):
        places.setdefault(dtype, []).append(i)
    return [
        DtypeGroup(np.asarray(those, np.int64), cut(tuple([sizes[i] for i in those])), len(those) == len(sizes))
        for those in places.values()
    ]


def groups_if_at_once(dtypes: Sequence[torch.dtype], sizes: Sequence[int]) -> list[DtypeGroup] | None:
    """Return the groups of a list of tensors, None for more than one launch reads."""
    return groups_of_dtypes(dtypes, sizes) if len(sizes) <= MOST_AT_ONCE else None


@dataclass(slots=True)
class DenseTensors:
    """Tensors that the kernels read in place, with the address and the number of elements of each.

    `groups` are those of `groups_of_dtypes` where the list is known.
    """

    tensors: Sequence[Tensor]
    addresses: Sequence[int]
    sizes: Sequence[int]
    groups: Sequence[DtypeGroup] | None = None

    def __getitem__(self, some: slice) -> "DenseTensors":
        return DenseTensors(self.tensors[some], self.addresses[some], self.sizes[some])

    def grouped(self) -> Sequence[DtypeGroup]:
        """Return the groups, found where they are not known."""
        return self.groups or groups_of_dtypes([x.dtype for x in self.tensors], self.sizes)


def dtypes_for(row_dtype: torch.dtype) -> frozenset[torch.dtype]:
    """Return the dtypes that the kernels read on a device whose rows have a dtype; plain operations read any other."""
    return FLOATS | WHOLE_NUMBERS if row_dtype is torch.float64 else FLOATS


def is_dense(x: Tensor) -> bool:
    """Whether a strided tensor's elements lie in memory one after another, in any order.

    >>> x = torch.zeros(2, 3, 4, 5)
    >>> is_dense(x.to(memory_format=torch.channels_last)), is_dense(x.transpose(0, 2)), is_dense(x[:, :2])
    (True, True, False)
    """
    if x.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def address_in_place(dtypes: frozenset[torch.dtype], x: Tensor) -> int:
    """Return the address of a plain tensor whose values the kernels can read there, else 0, and EMPTY for no values.

    The kernels do not care for the order of values, so a tensor may be channels-last or transposed.
    """
    if x.dtype not in dtypes or x.layout is not torch.strided:
        return 0
    try:
        if x.is_nested or not is_dense(x) or x.is_neg():
            return 0
        return address_in_memory(x) or (EMPTY if x.numel() == 0 else 0)
    except RuntimeError:  # values inside a functorch transform have no address
        return 0


def in_one_piece(dtypes: frozenset[torch.dtype], x: Tensor, most: int) -> Tensor:
    """Return a copy without gaps of a tensor that has some, where the kernels read the dtype; else `x`.

    No more than `most` elements are copied.
    """
    if x.dtype not in dtypes or x.layout is not torch.strided or x.is_nested or x.is_neg():
        return x
    return x if is_dense(x) or x.numel() > most else x.contiguous()


def addresses_in_place(dtypes: frozenset[torch.dtype], tensors: Sequence[Tensor]) -> list[int] | None:
    """Return `address_in_place` of many plain tensors; None if it is 0 for one of them."""
    if not dtypes.issuperset([x.dtype for x in tensors]):
        return None
    try:
        if not all(map(is_dense, tensors)) or True in map(Tensor.is_neg, tensors):
            return None
        addresses = list(map(Tensor.data_ptr, tensors))
    except RuntimeError:
        return None
    if min(addresses, default=LOW) < LOW:
        addresses = [address_in_place(dtypes, x) for x in tensors]
    return None if 0 in addresses else addresses
