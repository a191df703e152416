"""Answers one series on many ranks: the map of ranks by steps."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainsentry.exporters.files.foreign_files import Report
from trainsentry.exporters.live.run_folder import tables_of
from trainsentry.exporters.live.series_points import ALL_STEPS, points_of
from trainsentry.exporters.maps.map_svg import map_svg
from trainsentry.exporters.maps.ranks_map import ranks_map


def ranks_json(
    run: Path,
    ranks: Sequence[int],
    series: tuple[str, str, str],
    report: Report,
    steps: range = ALL_STEPS,
    incidents: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return the map of a series (table, name, statistic) on `ranks`, and how many of them have it."""
    table, name, statistic = series
    marked = [step for i in incidents if isinstance(step := i.get("first_seen", i.get("step")), int)]
    curves, whole = {}, True
    for rank in ranks:
        files = tables_of(run, str(rank)).get(table)
        if files:
            points = points_of(files, name, statistic, report, steps=steps, marked=marked, shared_by=len(ranks))
            whole = whole and points.whole
            if len(points.steps):
                curves[rank] = (points.steps.tolist(), points.values.tolist())
    shown = ranks_map(curves, incidents)
    title = f"{name}, {statistic}: ranks by steps"
    return {"rows": len(shown.names), "width": shown.steps_a_column, "whole": whole, "svg": map_svg(shown, title)}
