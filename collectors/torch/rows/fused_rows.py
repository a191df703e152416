"""Launches the fused kernels, keeps their partial rows, and combines those at the step's end or when space runs out."""

import contextlib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from trainsentry.collectors.torch.rows.device_statistics import row_dtype
from trainsentry.collectors.torch.rows.host_statistics import PLAIN

DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that the kernels read; plain tensor operations read any other."""

CHUNK: Final = 16_384
"""Elements per program: some million elements fill a device with programs, and their rows are few enough to combine."""

MAX_PROGRAMS: Final = 1_024
"""Programs per tensor, a few for each multiprocessor of a large device; larger tensors have larger chunks."""

ARENA_ROWS: Final = 65_536
"""Partial rows (8 MB in float64) kept before they are combined."""

BLOCK: Final = 1_024
"""Elements a program loads at a time: eight for each of 128 threads, so that accumulators fit into registers."""

DEVICES = frozenset({"cuda", "npu"})
"""Device types that Triton compiles for; Ascend needs triton-ascend."""


def kernels_for(device: torch.device) -> Any:
    """Return the module of the kernels, None when they do not run on `device`."""
    if device.type not in DEVICES:
        return None
    try:
        from trainsentry.collectors.torch.rows import triton_kernels
    except ImportError:
        return None
    return triton_kernels


class FusedRows:
    """Reads tensors of one device into partial rows; `combine` completes the rows."""

    def __init__(self, device: torch.device, kernels: Any) -> None:
        self.device = device
        self.kernels = kernels
        self.launches = 0
        self.dtype = row_dtype(device)
        self._split = self.dtype is not torch.float64
        self._partials: Tensor | None = None
        self._used = 0
        self._under_way: list[tuple[int, int, int, int]] = []
        self._stream: Any = None

    def reads(self, x: Tensor) -> bool:
        """Whether the kernels can read a tensor in place."""
        if type(x) not in PLAIN or x.dtype not in DTYPES or not x.is_contiguous() or x.is_neg():
            return False
        return x.numel() == 0 or x.data_ptr() != 0

    def begin(self, slot: int, x: Tensor, eps: float, rows: Tensor) -> None:
        """Read a tensor into row `slot` of `rows`, by one launch; earlier rows are combined first if space is short."""
        size = x.numel()
        chunk = chunk_of(size)
        programs = -(-size // chunk)
        first = self._room(programs, rows)
        if programs:
            self._launch(x, (x, x, x, x), first, size, chunk, eps, programs, many=False)
        self._under_way.append((slot, first, programs, size))

    def begin_many(self, slots: Sequence[int], tensors: Sequence[Tensor], eps: float, rows: Tensor) -> None:
        """Read many tensors, by one launch per dtype."""
        for dtype in dict.fromkeys(x.dtype for x in tensors):
            of_dtype = [(slot, x) for slot, x in zip(slots, tensors, strict=True) if x.dtype is dtype]
            sizes = np.asarray([x.numel() for _, x in of_dtype], np.int64)
            chunk = CHUNK
            while int((-(-sizes // chunk)).sum()) > ARENA_ROWS:
                chunk *= 2
            programs = -(-sizes // chunk)
            first = self._room(int(programs.sum()), rows)
            self._launch_many([x for _, x in of_dtype], sizes, programs, first, chunk, eps)
            starts = first + np.cumsum(programs) - programs
            for (slot, _), start, count, size in zip(of_dtype, starts, programs, sizes, strict=True):
                self._under_way.append((slot, int(start), int(count), int(size)))

    def combine(self, rows: Tensor) -> None:
        """Complete all rows under way, by one launch."""
        if not self._under_way:
            self._used = 0
            return
        table = self._to_device(np.asarray(self._under_way, np.int64).T.copy())
        slots, firsts, counts, sizes = table
        with self._on_device():
            self.kernels.combine_rows[(len(self._under_way),)](
                self._arena(),
                firsts,
                counts,
                sizes,
                slots,
                rows,
                split=self._split,
                accumulator=self._accumulator,
                block=256,
            )
        self.launches += 1
        self._under_way.clear()
        self._used = 0

    def _launch_many(
        self, tensors: Sequence[Tensor], sizes: Any, programs: Any, first: int, chunk: int, eps: float
    ) -> None:
        total = int(programs.sum())
        if not total:
            return
        addresses = np.asarray([x.data_ptr() for x in tensors], np.int64)
        tensor_of = np.repeat(np.arange(len(tensors)), programs)
        chunk_of = np.arange(total) - np.repeat(np.cumsum(programs) - programs, programs)
        table = self._to_device(np.concatenate([addresses, sizes, tensor_of, chunk_of]))
        n = len(tensors)
        parts = table[:n], table[n : 2 * n], table[2 * n : 2 * n + total], table[2 * n + total :]
        self._launch(tensors[0], parts, first, 0, chunk, eps, total, many=True)

    def _launch(
        self,
        x: Tensor,
        table: tuple[Tensor, ...],
        first: int,
        size: int,
        chunk: int,
        eps: float,
        programs: int,
        *,
        many: bool,
    ) -> None:
        with self._on_device():
            self.kernels.partial_rows[(programs,)](
                x,
                *table,
                self._arena(),
                first,
                size,
                chunk,
                float_below(eps),
                many=many,
                split=self._split,
                accumulator=self._accumulator,
                block=BLOCK,
            )
        self.launches += 1

    def forget(self, slot: int) -> None:
        """Drop the rows under way from `slot` on."""
        self._under_way = [waiting for waiting in self._under_way if waiting[0] < slot]

    def _on_device(self) -> Any:
        """Make the device current, as Triton launches there, and let its stream wait for the one used before."""
        if self.device.type == "cpu":
            return contextlib.nullcontext()
        module = torch.get_device_module(self.device)
        stream = module.current_stream(self.device)
        if self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)
        self._stream = stream
        return module.device(self.device)

    def _room(self, programs: int, rows: Tensor) -> int:
        """Reserve partial rows and return the first; combine those under way when there is not enough space."""
        if self._used + programs > ARENA_ROWS:
            self.combine(rows)
        first, self._used = self._used, self._used + programs
        return first

    def _arena(self) -> Tensor:
        if self._partials is None:
            shape = (ARENA_ROWS, self.kernels.PARTIAL_COLUMNS)
            self._partials = torch.empty(shape, dtype=self.dtype, device=self.device)
        return self._partials

    @property
    def _accumulator(self) -> Any:
        language = self.kernels.tl
        return language.float32 if self._split else language.float64

    def _to_device(self, table: Any) -> Tensor:
        host = torch.from_numpy(table)
        if self.device.type == "cpu":
            return host
        return host.pin_memory().to(self.device, non_blocking=True)


def chunk_of(size: int) -> int:
    """Return the elements of one program's chunk.

    >>> chunk_of(1000), chunk_of(64 * 2**20)
    (16384, 65536)
    """
    wanted = -(-size // MAX_PROGRAMS)
    return max(CHUNK, -(-wanted // BLOCK) * BLOCK)


def float_below(eps: float) -> float:
    """Return the largest float32 not above `eps`: kernels take their arguments in float32."""
    rounded = np.float32(eps)
    return float(np.nextafter(rounded, np.float32(-np.inf)) if float(rounded) > eps else rounded)
