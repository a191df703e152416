"""The settings that a recorder process starts with: the run's configuration, and the facts of one rank."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainsentry.collectors.histogram import HISTOGRAM
from trainsentry.collectors.series import SeriesTable
from trainsentry.collectors.statistics import STATISTICS
from trainsentry.exporters.exporter import (
    ExporterEntry,
    ExportPlace,
    LeftOut,
    Lost,
    Missing,
    Moment,
    nothing_left_out,
    nothing_lost,
    nothing_missing,
)
from trainsentry.exporters.registry import switched_on, table, user_folders
from trainsentry.monitor.recorder.ranks.tree_position import TreePosition


@dataclass(frozen=True)
class RecorderSettings:
    """Settings of one rank's recorder, and the series that are defined already.

    `config` is the validated configuration as plain data (`MonitorConfig.model_dump(mode="json")`); the properties read
    it. `output_dir` is absolute. `detect` is this rank's share of the false alarms with the user's detectors, None
    without detection. `exporters` is the table of exporters; the user's own are imported from `folders`.

    `restart` numbers the starts of a run in one directory; `relay` counts the recorders of this start. `position` is
    the rank's position in the tree of recorders, None for a single rank; a `quiet` rank writes no files of its own
    until an incident names it. `claim` is this start's claim in the directory; a run `beside` another one there gives
    its files names of their own. `gaps` are the gaps that earlier recorders of this start have reported.
    """

    config: dict[str, Any]
    output_dir: str
    rank: int
    start_step: int = 0
    detect: dict[str, Any] | None = None
    exporters: dict[str, str] = field(default_factory=table)
    folders: list[str] = field(default_factory=user_folders)
    restart: int = 0
    relay: int = 0
    definitions: dict[str, Any] = field(default_factory=dict)
    descriptors: tuple[int, int] = (-1, -1)
    parent: int = 0
    position: TreePosition | None = None
    quiet: bool = False
    claim: dict[str, Any] = field(default_factory=dict)
    beside: bool = False
    gaps: list[dict[str, Any]] = field(default_factory=list)

    # ------------------------------------------------------------------ the configuration

    @property
    def statistics(self) -> tuple[str, ...]:
        """The statistics that files have a column of numbers for."""
        return tuple(name for name in self.config["statistics"] if name in STATISTICS)

    @property
    def histograms(self) -> bool:
        """Whether files have the histograms of the tensors' values."""
        return HISTOGRAM in self.config["statistics"]

    @property
    def max_wait(self) -> float:
        """Seconds to wait for a writer or a full ring at most, in total per trouble."""
        return float(self.config["export"]["max_wait"])

    @property
    def ring_size(self) -> int:
        """Bytes of the ring, a multiple of 8."""
        return int(self.config["ring_size"]) // 8 * 8

    @property
    def disk_quota(self) -> int:
        """Largest size of this rank's tables and event files, in bytes."""
        return int(self.config["disk_quota"])

    @property
    def slowest_every(self) -> int:
        """Steps between two samples of the part that is sampled least often."""
        return max((part["every"] for part in self.config["collect"].values() if part is not None), default=1)

    def checks_overflow(self, *, in_incident: bool) -> bool:
        """Whether overflows are written: always, or only while an incident is open, or never."""
        on_incident = self.config["on_incident"]
        always = self.config["overflow_check"] is not None
        return always or (in_incident and on_incident is not None and bool(on_incident["overflow_check"]))

    def exporters_at(self, moment: Moment) -> Iterator[tuple[ExporterEntry, Any]]:
        """Yield the exporters that are switched on and run at a moment, each with its block."""
        found = switched_on(self.config["export"], self.exporters, self.folders)
        return ((entry, block) for entry, block in found if entry.at == moment)

    def place(
        self,
        directory: Path,
        table: SeriesTable,
        restart: int | None = None,
        lost: Lost = nothing_lost,
        missing: Missing = nothing_missing,
        left_out: LeftOut = nothing_left_out,
    ) -> ExportPlace:
        """Return the place of an exporter; `directory` is the rank's own or `global`."""
        return ExportPlace(
            Path(self.output_dir),
            directory,
            self.rank,
            table,
            self.statistics,
            start_step=self.start_step,
            restart=self.restart if restart is None else restart,
            beside=self.beside,
            lost=lost,
            missing=missing,
            left_out=left_out,
            histograms=self.histograms,
        )

    # ------------------------------------------------------------------ file names, and transfer to the process

    def file_name(self, name: str) -> str:
        """Return a file's name, with this start's number if another run uses the directory too.

        >>> settings = RecorderSettings({}, "out", 0, restart=1, beside=True)
        >>> settings.file_name("status.json"), settings.file_name("dump")
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
        values["descriptors"] = tuple(values["descriptors"])
        values["position"] = TreePosition.decode(values["position"]) if values["position"] is not None else None
        return cls(**values)
