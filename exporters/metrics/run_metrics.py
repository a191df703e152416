"""Metrics of a run, read from its own files.

So one endpoint serves all ranks of a run, and the training process counts nothing. A counter is there from zero on, so
that a server sees the first incident as an increase; a label never changes its value while a run goes on; a time is a
number of seconds since the epoch. Each metric has the label `run`, so that one node can hold several runs.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from trainsentry.exporters.files.foreign_files import InputError, read_lines
from trainsentry.exporters.run_reader import last_scalars, read_run
from trainsentry.exporters.run_state import STATES, RunState, state_of_rank, state_of_run, troubles_of

MAX_RANKS: Final = 64
"""Up to this many ranks, each has its number as the label `rank`; of larger runs only `min` and `max` are shown."""

SCALARS: Final = ("loss", "learning_rate", "grad_norm", "loss_scale")
"""Logged scalars that become metrics."""

_GAUGES: Final[tuple[tuple[str, str, Callable[[Mapping[str, Any]], Any]], ...]] = (
    ("step", "The last step that was recorded.", lambda s: s.get("step")),
    ("status_timestamp_seconds", "Time at which the rank last renewed its status.", lambda s: s.get("updated")),
    ("recorder_lag_steps", "Steps that the recorder is behind the training.", lambda s: s.get("lag_steps")),
    ("recorder_lag_seconds", "Seconds that the recorder is behind the training.", lambda s: s.get("lag_seconds")),
    ("step_seconds", "Median time of the newest steps.", lambda s: s["cost"]["step_seconds"]),
    ("overhead_ratio", "The monitor's share of the training's time.", lambda s: s["cost"]["recent_share"]),
    ("troubles", "Parts of the monitor that have failed.", lambda s: len(troubles_of(s))),
)
_COUNTERS: Final = (
    ("anomalies", "Abnormal values found."),
    ("overflow_steps", "Steps with an overflow."),
    ("skipped_steps", "Steps that the loss scaler skipped."),
    ("dropped_records", "Records of steps that found no room and reached no file."),
)
"""Metrics of a rank: name, help, and the number in its `status.json`; a counter has its name there."""


@dataclass(frozen=True)
class RunMetric:
    """A metric without the prefix of its system: its name, the names of its labels, and (labels, value) pairs."""

    name: str
    meaning: str
    labels: tuple[str, ...]
    samples: tuple[tuple[tuple[str, ...], float], ...]
    counts: bool = False


def metrics_of_run(root: Path, name: str | None = None, *, ending: bool = False) -> Iterator[RunMetric]:
    """Yield the present metrics of the run in `root`.

    `name` is the value of the label `run`, the directory's path by default. With `ending`, ranks that still run do not
    count for the state: nobody may be left to say how the run ended.
    """
    return _Collection(root, name or str(root.absolute()), ending=ending).metrics()


class _Collection:
    """One reading of a run's files."""

    def __init__(self, root: Path, name: str, *, ending: bool) -> None:
        self.root = root
        self.name = name
        self.ending = ending
        self.run = read_run(root)

    def metrics(self) -> Iterator[RunMetric]:
        yield from self._of_run()
        yield from self._incidents()
        for name, text, read in _GAUGES:
            yield self._by_rank(name, text, read)
        for name, text in _COUNTERS:
            yield self._by_rank(name, text, partial(_counted, name=name), counts=True)
        first = next(iter(self.run.ranks), 0)
        for name, points in last_scalars(self.root / f"rank{first}", 1 << 14).items():
            if name in SCALARS and points:
                yield self._gauge(name, f"The newest {name}.", points[-1][1])

    def _gauge(self, name: str, text: str, value: float | None) -> RunMetric:
        return RunMetric(name, text, ("run",), () if value is None else (((self.name,), float(value)),))

    def _of_run(self) -> Iterator[RunMetric]:
        labels = ("run", "output_dir", "framework", "accelerator")
        settings = [str(self.run.settings.get(key, "")) for key in labels[2:]]
        yield RunMetric("run_info", "The run.", labels, (((self.name, str(self.root), *settings), 1.0),))
        present = self._state()
        states = tuple(((self.name, state), float(state == present)) for state in STATES)
        text = "How the run stands: 1 for one of running, finished, stopped and crashed."
        yield RunMetric("run_state", text, ("run", "state"), states)
        yield self._gauge("start_timestamp_seconds", "Start of the run.", self.run.settings.get("start_time"))
        yield self._gauge("ranks", "Ranks that have written something.", len(self.run.ranks))
        running = sum(state_of_rank(status) == "running" for status in self.run.ranks.values())
        yield self._gauge("ranks_running", "Ranks at work.", running)

    def _state(self) -> RunState:
        state = state_of_run(self.run)
        if state != "running" or not self.ending:
            return state
        found = [state_of_rank(status) for status in self.run.ranks.values()]
        return next((end for end in ("crashed", "stopped", "finished") if end in found), state)

    def _incidents(self) -> Iterator[RunMetric]:
        counted = _count_incidents(self.root / "incidents.jsonl")
        for name, text, value in (
            ("incidents", "Incidents so far.", counted.all),
            ("critical_incidents", "Incidents so far that are, or were, critical.", counted.critical),
        ):
            yield RunMetric(name, text, ("run",), (((self.name,), float(value)),), counts=True)
        yield self._gauge("last_incident_step", "The first step of the newest incident.", counted.newest_step)

    def _by_rank(
        self, name: str, text: str, read: Callable[[Mapping[str, Any]], Any], *, counts: bool = False
    ) -> RunMetric:
        values: dict[int, float] = {}
        for rank, status in self.run.ranks.items():
            try:
                values[rank] = float(read(status))
            except (KeyError, TypeError, ValueError):
                continue  # the status is missing so far, or an older version wrote it
        shown: dict[Any, float] = dict(values)
        if len(self.run.ranks) > MAX_RANKS:
            shown = {"min": min(values.values()), "max": max(values.values())} if values else {}
        samples = tuple(((self.name, str(rank)), value) for rank, value in shown.items())
        return RunMetric(name, text, ("run", "rank"), samples, counts)


def _counted(status: Mapping[str, Any], name: str) -> Any:
    """Return a counter of a rank; it is 0 before the first is written."""
    return status.get(name, 0)


@dataclass(frozen=True)
class _Counts:
    all: int
    critical: int
    newest_step: int | None


def _count_incidents(path: Path) -> _Counts:
    """Count the incidents of a file that only grows; one that was critical once stays so, as a counter cannot fall."""
    steps: dict[Any, int] = {}
    critical: set[Any] = set()
    try:
        for _, line in read_lines(path, lambda *_: None):
            known = line.get("id")
            if not isinstance(known, int) or not isinstance(line.get("first_seen", 0), int):
                continue
            steps[known] = line.get("first_seen", 0)
            if line.get("severity") == "critical":
                critical.add(known)
    except (InputError, OSError):
        pass  # there is none so far
    return _Counts(len(steps), len(critical), steps[max(steps)] if steps else None)
