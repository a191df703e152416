from collections.abc import Sequence
from typing import Final

FLOAT32: Final[int]
BFLOAT16: Final[int]
FLOAT16: Final[int]
FLOAT64: Final[int]

# The statistics of `size` contiguous elements at `address`, as a row of 8 doubles at address `row`. `parallel` is the
# address of an OpenMP runtime's `GOMP_parallel`, or 0; so many of its `threads` share what is long.
def read(address: int, size: int, kind: int, eps: float, row: int, parallel: int, threads: int, /) -> None: ...

# The statistics of array i as row i of the float64 array of shape (n, 8) at `rows`. The sequences are lists of one
# length (else ValueError).
def read_many(
    addresses: Sequence[int],
    sizes: Sequence[int],
    kinds: Sequence[int],
    eps: float,
    rows: int,
    parallel: int,
    threads: int,
    /,
) -> None: ...
