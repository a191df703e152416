"""Answers a run's state: incidents, ranks, lag and cost, in as many words as a page can show."""

import time
from pathlib import Path
from typing import Any, Final

from trainsentry.exporters.files.foreign_files import Report
from trainsentry.exporters.live.run_folder import leads_out, ranks_with_tables
from trainsentry.exporters.run_reader import RecordedRun, read_run
from trainsentry.exporters.run_state import state_of_run
from trainsentry.exporters.short_text import flat, shorten

MAX_INCIDENTS: Final = 200
"""Incidents of an answer: the worst."""

MAX_RANKS: Final = 128
"""Ranks of an answer: those in trouble first."""

MAX_SUSPECTS: Final = 8
MAX_TEXT: Final = 2000
"""Characters of a sentence at most."""

SILENT_SECONDS: Final = 30.0
"""Seconds without a new status after which a running rank counts as silent; ranks write one every few seconds."""

_OF_INCIDENT: Final[tuple[str, ...]] = (
    "id", "step", "rank", "name", "quantity", "statistic", "kind", "severity", "score", "first_seen", "last_seen",
)  # fmt: skip
_OF_SUSPECT: Final[tuple[str, ...]] = ("name", "quantity", "rank", "kind", "statistic")
_OF_RANK: Final = ("step", "anomalies", "overflow_steps", "skipped_steps", "lag_steps", "lag_seconds", "note", "cost")


def state_of(path: Path, report: Report) -> dict[str, Any]:
    """Return a run's state as plain data; `report` gets what cannot be read."""
    for name in leads_out(path):
        report(path / name, 0, "leads out of the run")
    if leads_out(path):
        return {"state": "unreadable", "incidents": [], "ranks": [], "count": 0}
    run = read_run(path, report)
    now = time.time()
    ranks = [_rank(rank, status, now) for rank, status in run.ranks.items()]
    ranks.sort(key=lambda r: (not (r["trouble"] or r["silent"]), r["rank"]))
    return {
        "state": _state(run, ranks),
        "step": max((status.get("step", -1) for status in run.ranks.values()), default=-1),
        "age": min((r["age"] for r in ranks if r["age"] is not None), default=None),
        "started": run.settings.get("start_time"),
        "framework": f"{run.settings.get('framework', '')} {run.settings.get('framework_version', '')}".strip(),
        "world_size": run.settings.get("world_size"),
        "incidents": _incidents(run),
        "count": len(run.incidents),
        "ranks": ranks[:MAX_RANKS],
        "rank_count": len(ranks),
        "tables": ranks_with_tables(path)[: 4 * MAX_RANKS],
        "settings": [[key, shorten(str(value), 200)] for key, value in flat(run.settings.get("configuration", {}))][
            :200
        ],
        **_worst_numbers(run),
    }


def _state(run: RecordedRun, ranks: list[dict[str, Any]]) -> str:
    if not run.ranks:
        return "no status yet"
    if run.is_over:
        ended = state_of_run(run)
        return ended if run.has_steps else f"{ended} without a step"
    if ranks and all(r["silent"] or r["state"] != "running" for r in ranks):
        return "silent"
    return "running" if run.has_steps else "no step yet"


def _rank(rank: int, status: dict[str, Any], now: float) -> dict[str, Any]:
    age = now - status["updated"] if "updated" in status else None
    running = status.get("state") == "running"
    gaps = [
        f"{gap.get('sink')} lacks steps {gap.get('first_step')} to {gap.get('last_step')}: {gap.get('reason')}"
        for gap in status.get("gaps", [])
    ]
    trouble = "; ".join([*gaps, *(f"{part} is off" for part in status.get("failures", []))])
    return {
        "rank": rank,
        "state": status.get("state", "no status"),
        "age": age,
        "silent": running and age is not None and age > SILENT_SECONDS,
        "trouble": shorten(trouble, MAX_TEXT),
        **{key: status[key] for key in _OF_RANK if key in status},
    }


def _worst_numbers(run: RecordedRun) -> dict[str, Any]:
    """Return the largest lag and the largest cost of any rank; None where no rank says it."""

    def largest(*keys: str) -> float | None:
        found = []
        for status in run.ranks.values():
            value: Any = status
            for key in keys:
                value = value.get(key) if isinstance(value, dict) else None
            found += [value] if isinstance(value, (int, float)) else []
        return max(found, default=None)

    return {
        "lag_steps": largest("lag_steps"),
        "lag_seconds": largest("lag_seconds"),
        "cost": {key: largest("cost", key) for key in ("share", "recent_share", "seconds_a_step")},
    }


def _incidents(run: RecordedRun) -> list[dict[str, Any]]:
    """Return the worst incidents by number, the worst of them marked."""
    shown: list[dict[str, Any]] = []
    for position, incident in enumerate(run.incidents[:MAX_INCIDENTS]):
        one: dict[str, Any] = {key: incident[key] for key in _OF_INCIDENT if key in incident}
        one["summary"] = incident.get("summary", "")[:MAX_TEXT]
        one["actions"] = [text[:MAX_TEXT] for text in incident.get("actions", [])[:MAX_SUSPECTS]]
        one["suspects"] = [_suspect(suspect) for suspect in incident.get("suspects", [])[:MAX_SUSPECTS]]
        shown.append({**one, "worst": position == 0})
    return sorted(shown, key=lambda i: (i.get("id", 0), i.get("step", 0)))


def _suspect(suspect: dict[str, Any]) -> dict[str, Any]:
    one = {key: suspect[key] for key in _OF_SUSPECT if key in suspect}
    return {**one, "evidence": suspect.get("evidence", "")[:MAX_TEXT]}
