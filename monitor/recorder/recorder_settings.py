"""What a recorder is told as it starts."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from trainsentry.collectors.series import SeriesTable
from trainsentry.monitor.recorder.ranks.tree_position import TreePosition


@dataclass(frozen=True)
class RecorderSettings:
    """Settings of one rank's recorder, and the series that are defined already.

    `slowest_every` is how many steps lie between two samples of what is sampled most seldom. `restart` numbers the
    starts of a run in one directory; `relay` counts the recorders of this start. `max_wait` is in seconds. `position`
    is the rank's among several; a `quiet` one writes no files of its own before an incident names it. `claim` is this
    start's in the directory; one that is `beside` another run there gives its files names of their own. `gaps` are
    those that the recorders before it have told of.
    """

    output_dir: str
    rank: int
    statistics: tuple[str, ...]
    csv_steps_per_file: int | None
    tensorboard: dict[str, Any] | None
    detect: dict[str, Any] | None
    max_wait: float
    start_step: int
    disk_quota: int
    ring_size: int
    overflow_check: bool = True
    overflow_check_on_incident: bool = True
    slowest_every: int = 10
    restart: int = 0
    relay: int = 0
    definitions: dict[str, Any] = field(default_factory=dict)
    descriptors: tuple[int, int] = (-1, -1)
    parent: int = 0
    position: TreePosition | None = None
    quiet: bool = False
    report: bool = True
    finished_blocks: str = "csv"
    prometheus: dict[str, Any] | None = None
    webhook: dict[str, Any] | None = None
    wandb: dict[str, Any] | None = None
    mlflow: dict[str, Any] | None = None
    claim: dict[str, Any] = field(default_factory=dict)
    beside: bool = False
    gaps: list[dict[str, Any]] = field(default_factory=list)

    def own_name(self, name: str) -> str:
        """Return the name of a file of this run.

        >>> hello = RecorderSettings("out", 0, ("norm",), 1000, None, None, 5.0, 0, 2**30, 2**24, restart=1,
        ...                           beside=True)
        >>> hello.own_name("status.json"), hello.own_name("dump")
        ('status.r1.json', 'dump.r1')
        """
        if not self.beside:
            return name
        stem, dot, suffix = name.partition(".")
        return f"{stem}.r{self.restart}{dot}{suffix}"

    def encode(self) -> bytes:
        """Return the settings as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> "RecorderSettings":
        """Rebuild the settings."""
        values = json.loads(data)
        values["statistics"] = tuple(values["statistics"])
        values["descriptors"] = tuple(values["descriptors"])
        values["position"] = TreePosition.decode(values["position"]) if values["position"] is not None else None
        return cls(**values)


def for_successor(
    hello: RecorderSettings, table: SeriesTable, relay: int, gaps: Sequence[dict[str, Any]]
) -> RecorderSettings:
    """Return the hello for a successor of a recorder that died."""
    return replace(hello, definitions=table.definitions(), relay=relay, gaps=list(gaps))
