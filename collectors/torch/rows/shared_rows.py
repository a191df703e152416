"""Reads tensors that several series share, such as a module's output that is the next one's input: once a step."""

import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainsentry.collectors.series import SeriesTable
from trainsentry.collectors.shared.host_rows import HostRows
from trainsentry.collectors.shared.recurring_arrays import RecurringArray
from trainsentry.collectors.torch.device.registry import accelerator
from trainsentry.collectors.torch.rows.described_tensors import compiled_share, describe, described_address
from trainsentry.collectors.torch.rows.device_rows import DeviceRows
from trainsentry.collectors.torch.rows.gathered_tensors import GatherLimits, StorageFacts
from trainsentry.collectors.torch.rows.host_statistics import PARALLEL, address_of
from trainsentry.collectors.torch.rows.kernels.dense_tensors import EMPTY
from trainsentry.collectors.torch.rows.local_tensor import PLAIN, is_batched, is_readable, storage_range, whole_of
from trainsentry.collectors.torch.rows.row_lock import keep_threads_apart

SEVERAL: Final = 2
"""Devices of a process from which on several threads may add rows."""

_IS_NEGATED: Final = Tensor.is_neg


def _note_plainly(state: tuple[Any, ...], series_id: int, tensor: Tensor) -> bool | tuple[Tensor, int] | None:
    """Note a tensor as the compiled `share` does, but keep none; return what `SharedRows.settle` is told."""
    seen, _, ids, layouts, aliases, sources, _, layout_of, *_ = state
    whole = tensor if tensor._base is None else whole_of(tensor)
    try:
        version = whole._version
    except RuntimeError:
        return False
    known = seen.get(id(whole))
    if known is None or known[1] != version or known[0]() is not whole:
        return whole, version
    same = known[3] and tensor is whole
    layout = layouts[known[2]] if same else layout_of(tensor)
    aliases.append(len(ids))
    sources.append(known[2])
    layouts.append(layout)
    ids.append(series_id)
    return None


def _share_plainly(state: tuple[Any, ...], series_id: int, tensor: Tensor) -> None:
    """Do what the compiled `share` does."""
    *_, [is_captured], _, _, settle = state
    if is_captured is None or not is_captured():
        found = _note_plainly(state, series_id, tensor)
        if found is not None:
            settle(series_id, tensor, found)


share: Final[Callable[..., None]] = compiled_share or _share_plainly
"""Notes a tensor that several series may share; see `collectors/native/host_rows.pyi`."""

_Seen = tuple["weakref.ref[Tensor]", int, int, bool]
"""A tensor that was read in this step, its count of changes then, the position of its row, and whether the tensor
itself was read, and no view of it. No class: one is made for each tensor, and a plain tuple is made faster."""


class _Usual(NamedTuple):
    """A tensor that a device's kernels read in place in an earlier step, for a series.

    `special` says that another like it may be in a private format. The compiled `share` reads the first five by their
    places.
    """

    description: Any
    layout: int
    facts: StorageFacts
    special: bool
    waiting: tuple[Any, ...]
    rows: DeviceRows


class _UsualOnHost(NamedTuple):
    """A tensor in host memory that the kernel read in place in an earlier step, for a series."""

    description: Any
    layout: int


class SharedRows(HostRows):
    """Collects the rows of tensors that several series may share, and reads those of a device together.

    What is known of a series' tensor from an earlier step is not found again where the tensor is as it was.
    """

    def __init__(
        self,
        table: SeriesTable,
        eps: float,
        refused: Callable[[Exception], None] | None,
        limits: GatherLimits | None,
        *,
        histograms: bool,
    ) -> None:
        super().__init__(table, eps, refused, histograms=histograms)
        self.limits = limits or GatherLimits()
        self._devices: dict[torch.device, DeviceRows] = {}
        self._has_lock = False
        self._accelerator = accelerator()
        self._read_at_once: set[int] = set()
        self._usual: dict[int, _Usual | _UsualOnHost] = {}
        self._place_of_rows += [eps, PARALLEL, torch.get_num_threads]
        self._knows_host_tensors = compiled_share is not None and not histograms
        self._recurring_aliases = RecurringArray(np.intp)
        self._recurring_sources = RecurringArray(np.intp)
        self._aliases: list[int] = []
        self._sources: list[int] = []
        self._seen: dict[int, _Seen] = {}
        self._noted: list[int] = []
        self._stored_at: dict[int, list[int]] = {}
        self._aliased: dict[int, tuple[bytes, int]] = {}
        self._capture_test: list[Callable[[], bool] | None] = [None]
        lists = self._ids, self._layout_ids, self._aliases, self._sources
        known = self._capture_test, self._place_of_rows, self._aliased
        ways = whole_of, self._layout, _IS_NEGATED, self._noted, *known, self.settle
        self.add_shared: Callable[[int, Tensor], None] = partial(share, (self._seen, self._usual, *lists, *ways))
        """Appends the statistics of a tensor that several series may share: it is read once a step.

        A device's kernels read it later, with others; if it changes before that, it has no row.
        """
        self._forget_shared()

    def expect_devices(self, devices: Collection[torch.device]) -> None:
        """Prepare for rows of tensors on several devices, the host among them: autograd has a thread for each."""
        if len(devices) >= SEVERAL and not self._has_lock:
            self._has_lock = True
            keep_threads_apart(self)

    def _forget_shared(self) -> None:
        # While a device's graph is captured a row would be computed at each replay, but not now.
        self._capture_test[0] = None if self._accelerator is None else self._accelerator.capture_test()
        for noted in (self._aliases, self._sources, self._seen, self._noted, self._stored_at):
            noted.clear()

    def _is_captured(self) -> bool:
        [test] = self._capture_test
        return test is not None and test()

    def add(self, series_id: int, tensor: Tensor) -> None:
        """Append the statistics of a tensor's part on this rank."""
        raise NotImplementedError

    def _layout(self, tensor: Tensor) -> int:
        """Return the id of a tensor's layout."""
        raise NotImplementedError

    def _rows_on(self, device: torch.device) -> DeviceRows:
        rows = self._devices.get(device)
        if rows is None:
            rows = self._devices[device] = DeviceRows(device, self.eps, self.limits, histograms=self.histograms)
            self.expect_devices(self._devices)
        return rows

    def settle(self, series_id: int, tensor: Tensor, noted: bool | tuple[Tensor, int]) -> None:
        """Append a tensor that `share` has not settled.

        `noted` is True where it waits, and enough do to be read; False where it has no count of changes; else, with
        nothing noted, the tensor that it is a view of, or itself, and that one's count of changes.
        """
        if noted is True:
            usual = self._usual.get(series_id)
            if isinstance(
                usual, _Usual
            ):  # else another thread has read the series elsewhere, and `peek` reads what waits
                self._attempt(usual.rows.read_gathered)
        elif noted is False:
            self.add(series_id, tensor)
        else:
            self._add_first(series_id, tensor, *noted)

    def _add_first(self, series_id: int, tensor: Tensor, whole: Tensor, version: int) -> None:
        """Append a tensor that has no row in this step, as it is now: `whole` is what it is a view of, or itself."""
        position = len(self._ids)
        usual = self._usual.get(series_id)
        address = None
        if isinstance(usual, _Usual):
            address = described_address(tensor, usual.description, _IS_NEGATED)
            if (usual.special or tensor._base is not None) and address and self._is_special(tensor, usual):
                address = None
        if isinstance(usual, _Usual) and address:
            self._gather(series_id, tensor, address, version, usual)
        else:
            self._add_unusual(series_id, tensor, version)
        if len(self._ids) > position:
            self._seen[id(whole)] = weakref.ref(whole), version, position, tensor is whole
            self._noted.append(id(whole))

    def _add_unusual(self, series_id: int, tensor: Tensor, version: int) -> None:
        """Append a tensor that is not as usual for its series: with others where it can be read in place, or alone."""
        rows = self._devices.get(tensor.device)
        dense = _in_place(rows, tensor) if rows is not None and type(tensor) in PLAIN else None
        if rows is None or dense is None:
            self._add_usually(series_id, tensor)
            return
        layout, address = self._layout(tensor), rows.address_in_place(dense)
        facts = StorageFacts.of(dense)
        usual = _Usual(describe([dense]), layout, facts, rows.has_private_formats, rows.waiting, rows)
        if dense is not tensor:
            version = dense._version  # that of a copy
        elif address != EMPTY and usual.description is not None and series_id not in self._read_at_once:
            self._usual[series_id] = usual
        self._gather(series_id, dense, address, version, usual)

    def _add_usually(self, series_id: int, tensor: Tensor) -> None:
        """Append a tensor that no device's kernels read, and know it again if the host's kernel reads it in place."""
        position = len(self._ids)
        self.add(series_id, tensor)
        if self._knows_host_tensors and len(self._ids) > position and address_of(tensor):
            description = describe([tensor])
            if description is not None:
                self._usual[series_id] = _UsualOnHost(description, self._layout_ids[position])

    def _is_special(self, tensor: Tensor, usual: _Usual) -> bool:
        """Whether a tensor is in a private format, or keeps more memory in use than its series' usually does."""
        larger = tensor.untyped_storage().nbytes() > usual.facts.nbytes
        return larger or not usual.rows.have_plain_formats([tensor])

    def _gather(self, series_id: int, tensor: Tensor, address: int, version: int, usual: _Usual) -> None:
        """Append a tensor that its device's fused kernels will read in place."""
        position = len(self._ids)
        self._layout_ids.append(usual.layout)
        self._ids.append(series_id)
        self._attempt_rows([position], usual.rows.gather, position, tensor, address, version, usual.facts)
        if series_id in self._read_at_once:
            self._attempt(usual.rows.read_gathered)

    def before_write(self, tensors: Sequence[Tensor]) -> None:
        """Read what waits, and forget that it was read, where it shares memory with tensors that will be written now.

        Only a write that autograd does not count has to be told, such as a collective's.
        """
        if not (self._noted or self._stored_at) or self._is_captured():
            return
        for key in self._noted:
            whole = self._seen[key][0]()
            if whole is not None:
                self._stored_at.setdefault(storage_range(whole)[0], []).append(key)
        self._noted.clear()
        ranges = [(start, end) for start, end in map(storage_range, tensors) if start]
        for key in [key for start, _ in ranges for key in self._stored_at.pop(start, ())]:
            self._seen.pop(key, None)
        if any(rows.waits_in(ranges) for rows in self._devices.values()):
            self.read_gathered()

    def read_gathered(self) -> None:
        """Read the tensors that wait to be read together: they may be overwritten from now on."""
        for rows in self._devices.values():
            self._attempt(rows.read_gathered)

    def _drop_unwritten(self) -> int:
        """Drop rows without values, with their aliases; return how many were overwritten before they were read.

        The series of an overwritten tensor is read at once from now on.
        """
        if not self._dropped and not any(rows.overwritten or rows.lost for rows in self._devices.values()):
            return 0
        overwritten = {position for rows in self._devices.values() for position in rows.overwritten}
        self._dropped = self._dropped.union(overwritten, *(rows.lost for rows in self._devices.values()))
        aliases = list(zip(self._aliases, self._sources, strict=True))
        missing = {position for position, source in aliases if source in overwritten} | overwritten
        self._read_at_once.update(self._ids[position] for position in missing)
        for series_id in self._read_at_once:
            self._usual.pop(series_id, None)
        self._dropped |= {position for position, source in aliases if source in self._dropped}
        return len(missing)


def _in_place(rows: DeviceRows, tensor: Tensor) -> Tensor | None:
    """Return what the kernels read in place: a tensor, or a copy without its gaps; None where there is neither."""
    if rows.address_in_place(tensor):
        return tensor
    if is_batched(tensor) or not is_readable(tensor):
        return None
    dense = rows.in_one_piece(tensor.detach())
    return dense if rows.address_in_place(dense) else None
