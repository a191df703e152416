"""Reads the buffers of modules: running statistics, masks, position tables, router biases."""

from collections.abc import Collection
from typing import Final

from torch import Tensor

from trainsentry.collectors.series import BUFFER, Series
from trainsentry.collectors.shared.model_graph import NamedModule
from trainsentry.collectors.torch.rows.local_tensor import is_readable
from trainsentry.collectors.torch.rows.step_rows import StepRows
from trainsentry.collectors.torch.sharding.model_names import ModelNames

LARGEST: Final = 2**22
"""Elements of a buffer that are read, some 10 ms of a core: masks of long sequences have a hundred times as many."""


class BufferReader:
    """Appends a row for each buffer of the watched modules; a buffer that modules share has one."""

    def __init__(self, rows: StepRows, names: ModelNames) -> None:
        self.rows = rows
        self.names = names
        self._holders: list[NamedModule] = []
        self._known_of = 0

    def read(self, modules: Collection[str]) -> None:
        """Read the buffers of the modules of these names, as they are now: a module may replace its buffers."""
        if self._known_of != len(self.names.modules):  # looking at 5,000 modules takes a millisecond
            self._known_of = len(self.names.modules)
            self._holders = [named for named in self.names.modules if named.module._buffers]
        seen: set[int] = set()
        ids: list[int] = []
        tensors: list[Tensor] = []
        for named in self._holders:
            if named.name not in modules:
                continue
            for own, buffer in named.module._buffers.items():
                if isinstance(buffer, Tensor) and id(buffer) not in seen and buffer.numel() and is_readable(buffer):
                    seen.add(id(buffer))
                    ids.append(self._series_id(named, own))
                    tensors.append(_first(buffer.detach()))
        if ids:
            self.rows.add_many(ids, tensors)

    def _series_id(self, named: NamedModule, own: str) -> int:
        name = f"{named.name}.{own}" if named.name else own
        return self.rows.table.series_id(Series(name, BUFFER, module=named.name, vpp_stage=named.vpp_stage))


def _first(buffer: Tensor) -> Tensor:
    """Return a view of the first elements of a very large buffer, along its first dimension; others as they are."""
    if buffer.numel() <= LARGEST or buffer.dim() == 0:
        return buffer
    return buffer.narrow(0, 0, max(1, LARGEST * buffer.shape[0] // buffer.numel()))
