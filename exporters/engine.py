"""Where ranks and tables are read: one after the other here, or on a dask cluster."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

ENGINES: Final = ("local", "dask")
WORKERS: Final = 2
"""Processes of a dask cluster that is started here; one that is there already is given by its scheduler's address."""


class Mapper(Protocol):
    """Applies a function to items and returns the results in their order."""

    def __call__(self, function: Callable[[Item], Result], items: Sequence[Item], /) -> Iterable[Result]:
        """Return `function(item)` for each item."""


def map_locally(function: Callable[[Item], Result], items: Sequence[Item], /) -> Iterable[Result]:
    """Apply a function to items, one after the other."""
    return map(function, items)


@contextmanager
def engine(name: str, scheduler: str | None = None) -> Iterator[Mapper]:
    """Yield what applies functions: `map_locally`, or the cluster of a scheduler, or one of WORKERS processes of this machine.

    Raises:
        ValueError: for an engine that there is not, or that is not installed.

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
    own = {"n_workers": WORKERS, "threads_per_worker": 1, "dashboard_address": None, "silence_logs": 50}
    with cluster(scheduler) if scheduler else cluster(**own) as client:
        yield lambda function, items: client.gather(client.map(function, items, pure=False))
