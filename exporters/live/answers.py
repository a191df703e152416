"""Answers what the page asks, in bounded time, size and memory; keeps what is asked again and again for a moment."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from trainsentry.exporters.csv.format import SCALARS, TableFile
from trainsentry.exporters.files.foreign_files import InputError
from trainsentry.exporters.live.layer_map import LayerMap, map_json, read_map
from trainsentry.exporters.live.modules import modules_json
from trainsentry.exporters.live.rank_view import ranks_json
from trainsentry.exporters.live.run_folder import find_runs, ranks_with_tables, short_run, tables_of
from trainsentry.exporters.live.run_state import state_of
from trainsentry.exporters.live.series_index import KnownSeries, matching, series_of
from trainsentry.exporters.live.series_points import ALL_STEPS, points_of
from trainsentry.exporters.maps.ranks_map import chosen_ranks
from trainsentry.exporters.short_text import shorten

MAX_MAPS: Final = 4
"""Maps kept in memory: at most 20 MB each."""

FRESH_SECONDS: Final = 1.0
"""Seconds for which an answer about files that may have changed is given again; at least as long as it took to make."""

LIST_SECONDS: Final = 20.0
"""The same for the list of series, which changes only when a new part of a model is recorded."""

MAX_PROBLEMS: Final = 5
MAX_KEPT: Final = 64
"""Answers kept at most."""

Query = Mapping[str, str]
"""A request's parameters: `run`, `rank`, `table`, `name`, `statistic`, `stage`, `first`, `last`, `words`."""


class Problems:
    """Collects the problems of files as lines, the first few and the number of all."""

    def __init__(self, root: Path) -> None:
        self.lines: dict[str, None] = {}
        self.count = 0
        self._root = root

    def __call__(self, path: Path, line: int, message: str) -> None:
        """Add a problem; see `exporters.files.foreign_files.Report`."""
        self.count += 1
        name = path.relative_to(self._root) if path.is_relative_to(self._root) else Path(path.name)
        if len(self.lines) < MAX_PROBLEMS:
            self.lines[shorten(f"{name}{f':{line}' if line else ''}: {message}", 300)] = None

    def of(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return an answer with the problems that were met in making it."""
        return {**answer, "problems": list(self.lines), "problem_count": self.count} if self.count else answer


class Answers:
    """Answers questions about the runs in a folder; each method may be called from several threads.

    A method raises `InputError` where a question makes no sense: no such run, no such series, a step that is no number.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder = folder.resolve()
        self._clock = clock
        self._kept: OrderedDict[tuple[str, ...], tuple[float, Any]] = OrderedDict()
        self._maps: OrderedDict[tuple[str, ...], LayerMap] = OrderedDict()
        self._guard = threading.Lock()
        self._reading = threading.Lock()
        """One map is read at a time: a map is changed as it is read, and two would take twice the memory."""

    def runs(self, query: Query) -> dict[str, Any]:
        """Return the runs of the folder, the newest first."""
        del query
        return {"folder": self.folder.name, "runs": [short_run(name, path) for name, path in self._runs().items()]}

    def state(self, query: Query) -> dict[str, Any]:
        """Return a run's incidents, ranks, lag and cost."""
        run = self._run(query)

        def read() -> dict[str, Any]:
            problems = Problems(run)
            return problems.of(state_of(run, problems))

        found: dict[str, Any] = self._fresh(("state", str(run)), FRESH_SECONDS, read)
        return found

    def modules(self, query: Query) -> dict[str, Any]:
        """Return the tree of a run's modules, those marked in which something was found."""
        run, problems = self._run(query), Problems(self._run(query))
        found = self._fresh(("modules", str(run)), 5 * FRESH_SECONDS, lambda: modules_json(run, problems))
        return problems.of(found)

    def series(self, query: Query) -> dict[str, Any]:
        """Return the series of a rank that have all `words` in their name, and the tables of the rank."""
        run, problems = self._run(query), Problems(self._run(query))
        tables = tables_of(run, query.get("rank", "0"))
        key = ("series", str(run), query.get("rank", "0"))
        known: list[KnownSeries] = self._fresh(key, LIST_SECONDS, lambda: series_of(tables, problems))
        steps = [min((f.first for files in tables.values() for f in files), default=0)]
        answer = matching(known, query.get("words", "")[:500])
        return problems.of({**answer, "tables": [t for t in tables if t != SCALARS], "first": steps[0]})

    def points(self, query: Query) -> dict[str, Any]:
        """Return the points of one series at the steps asked for."""
        run, problems = self._run(query), Problems(self._run(query))
        files = self._files(run, query)
        stage = _whole(query, "stage", -1)
        name, statistic = query.get("name", ""), query.get("statistic", "norm")
        points = points_of(
            files,
            name,
            statistic,
            problems,
            stage=None if stage < 0 else stage,
            steps=_steps(query),
            marked=self._marked(query),
        )
        return problems.of(points.to_json())

    def map(self, query: Query) -> dict[str, Any]:
        """Return the map of layers by steps of a table."""
        run, problems = self._run(query), Problems(self._run(query))
        files, steps = self._files(run, query), _steps(query)
        key = (str(run), query.get("rank", "0"), files[0].table, str(steps))
        with self._reading:
            made = read_map(self._maps.get(key), files, steps, self._marked(query), problems, self._clock)
            self._maps[key] = made
            self._maps.move_to_end(key)
            while len(self._maps) > MAX_MAPS:
                self._maps.popitem(last=False)
            return problems.of(map_json(made, self._incidents(query)))

    def ranks(self, query: Query) -> dict[str, Any]:
        """Return one series on many ranks, ranks by steps."""
        run, problems = self._run(query), Problems(self._run(query))
        known = [int(rank) for rank in ranks_with_tables(run) if rank.isdigit()]
        wanted = [i["rank"] for i in self._incidents(query) if "rank" in i]
        series = (query.get("table", SCALARS), query.get("name", "loss"), query.get("statistic", "value"))
        steps, incidents = _steps(query), self._incidents(query)
        key = ("ranks", str(run), *series, str(steps))
        shown = chosen_ranks(known, wanted)
        answer = self._fresh(key, 5 * FRESH_SECONDS, lambda: ranks_json(run, shown, series, problems, steps, incidents))
        return problems.of({**answer, "rank_count": len(known)})

    def _runs(self) -> dict[str, Path]:
        found: dict[str, Path] = self._fresh(("runs",), FRESH_SECONDS, lambda: find_runs(self.folder))
        return found

    def _run(self, query: Query) -> Path:
        runs = self._runs()
        name = query.get("run", "")
        if name in runs:
            return runs[name]
        if not name and len(runs) == 1:
            return next(iter(runs.values()))
        if not runs:
            raise InputError("the folder holds no run yet (expected rank0/ with status.json in it)")
        raise InputError(f"no such run: {shorten(name, 100)!r}" if name else "run: missing; the folder holds several")

    def _files(self, run: Path, query: Query) -> list[TableFile]:
        tables = tables_of(run, query.get("rank", "0"))
        table = query.get("table", SCALARS)
        if table not in tables:
            raise InputError(f"rank {query.get('rank', '0')} has no table {shorten(table, 100)!r} yet")
        return tables[table]

    def _incidents(self, query: Query) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.state(query)["incidents"]
        return found

    def _marked(self, query: Query) -> list[int]:
        return [step for i in self._incidents(query) if isinstance(step := i.get("first_seen", i.get("step")), int)]

    def _fresh(self, key: tuple[str, ...], seconds: float, make: Callable[[], Any]) -> Any:
        """Return an answer made less than `seconds` ago, or make it; one that is long in the making is kept longer."""
        with self._guard:
            known = self._kept.get(key)
            if known is not None and self._clock() < known[0]:
                return known[1]
        began = self._clock()
        made = make()
        with self._guard:
            now = self._clock()
            self._kept[key] = (now + max(seconds, 3 * (now - began)), made)
            self._kept.move_to_end(key)
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return made


def _whole(query: Query, key: str, otherwise: int) -> int:
    text = query.get(key, "")
    if not text:
        return otherwise
    if not (text.isascii() and text.isdigit() and len(text) <= 16):
        raise InputError(f"{key}: {shorten(text, 40)!r} is not a step; allowed: a whole number from 0 on")
    return int(text)


def _steps(query: Query) -> range:
    first, last = _whole(query, "first", 0), _whole(query, "last", ALL_STEPS.stop - 1)
    if last < first:
        raise InputError(f"last: {last} comes before first: {first}")
    return range(first, last + 1)
