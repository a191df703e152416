from collections.abc import Callable, Sequence
from typing import Final

FLOAT32: Final[int]
BFLOAT16: Final[int]
FLOAT16: Final[int]
FLOAT64: Final[int]

# Elements beyond which torch itself uses several threads (`at::internal::GRAIN_SIZE`). Below it the monitor must not
# start any: a child process forked afterwards would wait for threads that it does not have.
SHARED_FROM: Final[int]

# Writes the statistics of `size` contiguous elements at `address` as a row of 8 doubles at address `row`. `parallel` is
# the address of an OpenMP runtime's `GOMP_parallel`, or 0; `threads` of its threads share a long array. The elements
# times `scale` are added to the 512 counters (uint32) at address `counts`, unless that is 0.
def read(
    address: int,
    size: int,
    kind: int,
    eps: float,
    row: int,
    parallel: int,
    threads: int,
    counts: int = 0,
    scale: float = 1.0,
    /,
) -> None: ...

# Writes the statistics of array i to row i of the float64 array of shape (n, 8) at `rows`. The sequences are lists of
# equal length (else ValueError). `counts` are uint32 of shape (n, 512).
def read_many(
    addresses: Sequence[int],
    sizes: Sequence[int],
    kinds: Sequence[int],
    eps: float,
    rows: int,
    parallel: int,
    threads: int,
    counts: int = 0,
    scale: float = 1.0,
    /,
) -> None: ...

# Writes how arrays i of two lists point to row i of the float64 array of shape (n, 8) at `rows`: the share of equal
# signs in the columns of a tensor of one element, and the cosine as the value; see collectors/alignment.py. Addresses
# and kinds are those of each side, `sizes` of both.
def align(
    first_addresses: Sequence[int],
    first_kinds: Sequence[int],
    second_addresses: Sequence[int],
    second_kinds: Sequence[int],
    sizes: Sequence[int],
    rows: int,
    parallel: int,
    threads: int,
    /,
) -> None: ...

# Describes tensors by the C functions in DLPack's capsule `functions`: type, device, dtype and shape of each. None
# where one is not dense, has no memory of its own, or cannot be seen by DLPack.
def describe(functions: object, tensors: Sequence[object], /) -> bytes | None: ...

# Returns the address of a tensor that is as described, 0 for one without elements; None for any other, and for one of
# which the method `is_negated` does not return False.
def described_address(
    functions: object, tensor: object, description: bytes, is_negated: Callable[..., bool], /
) -> int | None: ...

# Returns the addresses of tensors that are all as described, else None.
def described_addresses(
    functions: object, tensors: Sequence[object], description: bytes, is_negated: Callable[..., bool], /
) -> list[int] | None: ...

# Writes the statistics of tensors in host memory, the largest of `largest` elements, to the rows from `position` on, if
# all are as described and there is room; returns whether. `host` is the list that `SharedRows` keeps: where rows and
# counters lie, how many have room, and how tensors are read.
def read_described(
    functions: object,
    tensors: Sequence[object],
    description: bytes,
    is_negated: Callable[..., bool],
    host: list[object],
    position: int,
    largest: int,
    counted: bool,
    scale: float,
    /,
) -> bool: ...

# Notes a tensor that several series may share, by the containers in `state`: see shared_tensors.h. Where that does not
# settle it, `SharedRows.settle`, which is in the state, does.
def share(functions: object, state: tuple[object, ...], series_id: int, tensor: object, /) -> None: ...

# Tells of each tensor whether it has the same count of changes and address as when these were noted; the address of a
# tensor without elements is -1. The sequences are lists of equal length (else TypeError).
def are_intact(
    functions: object, tensors: Sequence[object], versions: Sequence[int], addresses: Sequence[int], /
) -> list[bool]: ...
