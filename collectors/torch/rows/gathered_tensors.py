"""Keeps tensors of a device until they are read together, and notices those that were overwritten meanwhile."""

from dataclasses import dataclass
from itertools import compress

from torch import Tensor

from trainsentry.collectors.settings import READ_TOGETHER, READ_TOGETHER_BYTES
from trainsentry.collectors.torch.rows.fused_rows import EMPTY, DenseTensors


@dataclass(frozen=True, slots=True)
class GatherLimits:
    """How many tensors of a device wait to be read together, and how many bytes of memory they may keep in use."""

    tensors: int = READ_TOGETHER
    nbytes: int = READ_TOGETHER_BYTES


class GatheredTensors:
    """References to tensors, with the position of each one's row in the record.

    A tensor that changes before it is read shows by autograd's count of in-place changes, or by its address where its
    memory was taken away or replaced. A waiting tensor keeps its whole storage in memory, so that is what is counted.
    """

    def __init__(self, limits: GatherLimits) -> None:
        self.limits = limits
        self.drop()

    def drop(self) -> None:
        """Drop all."""
        self.positions: list[int] = []
        self.nbytes = 0
        self._tensors: list[Tensor] = []
        self._versions: list[int] = []
        self._addresses: list[int] = []

    def add(self, position: int, x: Tensor, address: int) -> bool:
        """Keep a tensor that autograd counts the changes of; return whether a limit is reached, so all must be read."""
        if x.requires_grad:
            x = x.detach()  # shares the count of changes, and does not keep the graph alive
        self.positions.append(position)
        self._tensors.append(x)
        self._versions.append(x._version)
        self._addresses.append(address)
        self.nbytes += x.untyped_storage().nbytes()
        return len(self.positions) >= self.limits.tensors or self.nbytes >= self.limits.nbytes

    def take(self) -> tuple[list[int], DenseTensors, list[int]]:
        """Return positions and tensors to read, and the positions of those that were overwritten; keep none."""
        positions, tensors, addresses, versions = self.positions, self._tensors, self._addresses, self._versions
        self.drop()
        overwritten: list[int] = []
        if [x._version for x in tensors] != versions or [x.data_ptr() or EMPTY for x in tensors] != addresses:
            waiting = zip(tensors, versions, addresses, strict=True)
            intact = [x._version == version and (x.data_ptr() or EMPTY) == address for x, version, address in waiting]
            overwritten = [position for position, same in zip(positions, intact, strict=True) if not same]
            positions, tensors = list(compress(positions, intact)), list(compress(tensors, intact))
            addresses = list(compress(addresses, intact))
        return positions, DenseTensors(tensors, addresses, [x.numel() for x in tensors]), overwritten
