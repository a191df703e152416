"""Answers the tree of a run's modules, as the report has it: where something was found, and below what it lies."""

from pathlib import Path
from typing import Any, Final

from trainsentry.exporters.files.foreign_files import Report
from trainsentry.exporters.live.run_folder import leads_out
from trainsentry.exporters.report.module_tree import Node, module_tree
from trainsentry.exporters.run_reader import anomalies_since, read_run

MAX_RANKS: Final = 4
"""Ranks whose anomalies are shown: those of the worst suspects, or the first."""

MAX_ANOMALIES: Final = 1000
"""Anomalies of a rank that are read, from the first incident on."""

MAX_SERIES: Final = 3
"""Abnormal series of a module that are named, those of suspects first."""


def modules_json(path: Path, report: Report) -> dict[str, Any]:
    """Return the tree of a run as plain data: `tree` is None where no module is known."""
    if leads_out(path):
        return {"tree": None, "left_out": 0}
    run = read_run(path, report)
    suspects = [suspect for incident in run.incidents for suspect in incident.get("suspects", [])[:1]]
    blamed = [suspect["rank"] for suspect in suspects if suspect["rank"] in run.ranks]
    since = min((i["first_seen"] for i in run.incidents if "first_seen" in i), default=0)
    anomalies: list[dict[str, Any]] = []
    for rank in list(dict.fromkeys([*blamed, *list(run.ranks)[:1]]))[:MAX_RANKS]:
        anomalies += anomalies_since(path / f"rank{rank}", since, MAX_ANOMALIES, report)[0]
    found = module_tree(run, anomalies)
    if found is None:
        return {"tree": None, "left_out": 0}
    return {"tree": _plain(found[0], {(s["quantity"], s["name"]) for s in suspects}), "left_out": found[1]}


def _plain(node: Node, suspects: set[tuple[str, str]]) -> dict[str, Any]:
    series = sorted(node.series, key=lambda one: (one not in suspects, one))
    return {
        "name": node.name,
        "label": node.label,
        "kind": node.kind,
        "state": node.state,
        "worst": node.worst,
        "since": node.since,
        "incidents": node.incidents,
        "series": [list(one) for one in series[:MAX_SERIES]],
        "more": max(0, len(node.series) - MAX_SERIES),
        "children": [_plain(child, suspects) for child in node.children.values()],
    }
