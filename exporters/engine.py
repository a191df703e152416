"""Chooses where ranks and tables are read: one after the other in this process, or on a dask cluster."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

ENGINES: Final = ("local", "dask")
WORKERS: Final = 2
"""Processes of a local dask cluster; an existing cluster is given by its scheduler's address."""


class Mapper(Protocol):
    """Applies a function to items and returns the results in order."""

    def __call__(self, function: Callable[[Item], Result], items: Sequence[Item], /) -> Iterable[Result]:
        """Return `function(item)` for each item."""


def map_locally(function: Callable[[Item], Result], items: Sequence[Item], /) -> Iterable[Result]:
    """Apply a function to items in this process, one after the other."""
    return map(function, items)


@contextmanager
def engine(name: str, scheduler: str | None = None) -> Iterator[Mapper]:
    """Yield a mapper: `map_locally`, or that of the cluster at `scheduler` or of a local one of WORKERS processes.

    Raises:
        ValueError: for an unknown engine, or one that is not installed.

    """
    if name == "local":
        yield map_locally
        return
    if name != "dask":
        raise ValueError(f"--engine: {name!r}; allowed: {', '.join(ENGINES)}")
    try:
        from distributed import Client
    except ImportError:
        raise ValueError("--engine: 'dask' is not installed; allowed: pip install 'trainsentry[dask]'") from None
    cluster: Any = Client  # dask has no types
    local = {"n_workers": WORKERS, "threads_per_worker": 1, "dashboard_address": None, "silence_logs": 50}
    with cluster(scheduler) if scheduler else cluster(**local) as client:
        yield lambda function, items: client.gather(client.map(function, items, pure=False))
