"""Reads the digest of a run from its files, and keeps it small."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainsentry.exporters.csv.format import SCALARS
from trainsentry.exporters.csv.reader import read_steps, table_files
from trainsentry.exporters.csv.table_rows import RowKeys
from trainsentry.exporters.files.foreign_files import InputError, Report
from trainsentry.exporters.incident_groups import IncidentGroup, grouped
from trainsentry.exporters.report.digest import (
    FORMAT,
    AbnormalValue,
    Digest,
    DigestIncident,
    DigestMonitor,
    DigestRank,
    DigestRun,
    DigestScalar,
    DigestSuspect,
    DigestVerdict,
    Status,
)
from trainsentry.exporters.report.digest_pointers import pointers_of
from trainsentry.exporters.run_reader import RecordedRun, anomalies_since, read_run
from trainsentry.exporters.run_state import lag_of, state_of_rank, state_of_run, troubles_of
from trainsentry.exporters.short_text import counted, plain, shorten

DIGEST_BYTES: Final = 8192
"""Bytes of a digest as JSON at most: some 2,500 tokens of a language model, and well under a ticket's limit."""

SHOWN_SCALARS: Final = ("loss", "grad_norm", "learning_rate", "loss_scale")

READ_ANOMALIES: Final = 200
"""Anomalies of a rank that are read for an incident; the first few are shown."""


@dataclass(frozen=True)
class _Room:
    """How much of a run is shown; a digest that is too large is made again with less."""

    incidents: int
    suspects: int
    values: int
    ranks: int
    text: int

    def cut(self, text: Any) -> str:
        """Return the beginning of a sentence."""
        whole = plain(str(text)).replace("\n", " ")
        return whole if len(whole) <= self.text else f"{whole[: self.text - 1]}…"


_ROOMS: Final = (_Room(4, 3, 4, 8, 400), _Room(3, 3, 2, 4, 240), _Room(2, 2, 1, 2, 160), _Room(1, 1, 0, 1, 80))


def digest_of(root: Path, report: Report = lambda *_: None) -> Digest:
    """Return the digest of the run in `root`, of at most `DIGEST_BYTES` bytes as JSON.

    Raises:
        InputError: when `root` holds no output of trainsentry.

    """
    run = read_run(root, report)
    if not run.ranks:
        raise InputError(f"{root}: holds no output of trainsentry (expected rank0/ with status.json in it)")
    scalars = _scalars(run, report)
    digest = _digest(run, scalars, _ROOMS[0], report)
    for room in _ROOMS[1:]:
        if len(digest.model_dump_json(indent=1).encode()) <= DIGEST_BYTES:
            break
        digest = _digest(run, scalars, room, lambda *_: None)  # the first pass has reported the problems
    return digest


def _digest(run: RecordedRun, scalars: list[DigestScalar], room: _Room, report: Report) -> Digest:
    groups = grouped(run.incidents)
    ranks = sorted(run.ranks.items(), key=lambda item: (not troubles_of(item[1]), item[0]))
    gaps = [(rank, gap) for rank, status in ranks for gap in status.get("gaps", [])]
    lag_steps, lag_seconds = lag_of(run)
    return Digest(
        format=FORMAT,
        verdict=_verdict(run, room),
        run=_run(run, room),
        incidents=[_incident(run, group, room, report) for group in groups[: room.incidents]],
        incidents_left_out=sum(len(group.all) for group in groups[room.incidents :]),
        scalars=[scalar for scalar in scalars if room.values or scalar.name == "loss"],
        ranks=[_rank(rank, status, room) for rank, status in ranks[: room.ranks]],
        ranks_left_out=max(0, len(ranks) - room.ranks),
        monitor=DigestMonitor(
            cost_share=_most(run, "share"),
            lag_steps=lag_steps,
            lag_seconds=lag_seconds,
            gaps=[room.cut(_gap(rank, gap)) for rank, gap in gaps[: room.ranks]],
        ),
        pointers=pointers_of(run, groups[: room.incidents], room.cut),
    )


def _verdict(run: RecordedRun, room: _Room) -> DigestVerdict:
    incidents = run.incidents
    critical = sum(incident.get("severity") == "critical" for incident in incidents)
    first = min((i["first_seen"] for i in incidents if "first_seen" in i), default=None)
    if incidents:
        count = f"{counted(len(incidents), 'incident')}, {critical} critical. "
        sentence = f"{count}{room.cut(incidents[0].get('summary', ''))}"
    elif run.has_steps:
        sentence = f"No incident up to step {_last_step(run)} on {counted(len(run.ranks), 'rank')}."
    else:
        sentence = "No step was recorded, so nothing could be judged."
    status: Status = "incidents" if incidents else "clean" if run.has_steps else "no_steps"
    return DigestVerdict(
        status=status,
        sentence=sentence,
        incidents=len(incidents),
        critical=critical,
        earliest_step=first,
    )


def _run(run: RecordedRun, room: _Room) -> DigestRun:
    settings = run.settings
    framework = " ".join(str(settings[key]) for key in ("framework", "framework_version") if key in settings)
    why = next((status["why"] for status in run.ranks.values() if status.get("why")), None)
    return DigestRun(
        directory=plain(str(run.root)),
        state=state_of_run(run),
        why=None if why is None else room.cut(why),
        framework=room.cut(framework) or None,
        accelerator=room.cut(settings["accelerator"]) if "accelerator" in settings else None,
        ranks=len(run.ranks),
        last_step=_last_step(run),
        started=settings.get("start_time"),
        updated=max((s["updated"] for s in run.ranks.values() if "updated" in s), default=None),
        step_seconds=_most(run, "step_seconds"),
    )


def _incident(run: RecordedRun, group: IncidentGroup, room: _Room, report: Report) -> DigestIncident:
    found = group.worst
    suspects = found.get("suspects", [])
    return DigestIncident(
        **{key: found.get(key) for key in ("id", "severity", "kind", "rank", "quantity", "statistic")},
        name=_name(found.get("name"), room),
        first_step=found.get("first_seen"),
        last_step=found.get("last_seen"),
        sentence=room.cut(found.get("summary", "")),
        suspects=[_suspect(suspect, room) for suspect in suspects[: room.suspects]],
        first_values=_values(run, found, room, report) if room.values else [],
        repeats=group.repeats[:20],
        actions=[room.cut(action) for action in found.get("actions", [])[:4]],
    )


def _suspect(suspect: dict[str, Any], room: _Room) -> DigestSuspect:
    evidence = suspect.get("evidence")
    facts: dict[str, Any] = {key: suspect.get(key) for key in ("rank", "quantity", "statistic", "kind", "step")}
    return DigestSuspect(
        **facts,
        name=_name(suspect["name"], room),
        score=_finite(suspect.get("score")),
        evidence=None if evidence is None else room.cut(evidence),
    )


def _values(run: RecordedRun, incident: dict[str, Any], room: _Room, report: Report) -> list[AbnormalValue]:
    """Return the first abnormal value of each series on the first suspect's rank, in the order of the suspects."""
    rank, since = incident.get("rank"), incident.get("first_seen", 0)
    if rank not in run.ranks:
        return []
    found, _ = anomalies_since(run.root / f"rank{rank}", since, READ_ANOMALIES, report)
    last = incident.get("last_seen", since)
    first: dict[tuple[str, str], dict[str, Any]] = {}
    for anomaly in found:
        if anomaly["step"] <= last:
            first.setdefault((anomaly["name"], anomaly["quantity"]), anomaly)
    order = [(s["name"], s["quantity"]) for s in incident.get("suspects", []) if s["rank"] == rank]
    shown = dict.fromkeys(key for key in [*order, *first] if key in first)
    return [_value(first[key], rank, room) for key in list(shown)[: room.values]]


def _value(anomaly: dict[str, Any], rank: int, room: _Room) -> AbnormalValue:
    facts: dict[str, Any] = {key: anomaly.get(key) for key in ("step", "quantity", "statistic")}
    facts |= {"value": _finite(anomaly.get("value")), "usual": _finite(anomaly.get("expected"))}
    return AbnormalValue(**facts, rank=rank, name=_name(anomaly["name"], room))


def _rank(rank: int, status: dict[str, Any], room: _Room) -> DigestRank:
    counters = {key: status.get(key) for key in ("step", "anomalies", "overflow_steps", "skipped_steps")}
    troubles = [room.cut(part) for part in troubles_of(status)[:8]]
    return DigestRank(rank=rank, state=state_of_rank(status), troubles=troubles, **counters)


def _scalars(run: RecordedRun, report: Report) -> list[DigestScalar]:
    """Return the extremes and ends of the scalars that the first rank logged."""
    try:
        files = table_files(run.root / f"rank{next(iter(run.ranks))}").get(SCALARS, [])
    except InputError:
        return []
    keys = RowKeys()
    found: dict[str, _Course] = {}
    for rows in read_steps(files, keys, report):
        for key, value in zip(rows.keys.tolist(), rows.values[:, 0].tolist(), strict=True):
            if (name := keys.keys[key].name) in SHOWN_SCALARS:
                found.setdefault(name, _Course(rows.step, value)).take(rows.step, value)
    return [found[name].shown(name) for name in SHOWN_SCALARS if name in found]


class _Course:
    """The ends and the extremes of a scalar whose values come by ascending step; a run may have millions."""

    def __init__(self, step: int, value: float) -> None:
        self.first = self.last = (step, value)
        self.lowest, self.highest = math.inf, -math.inf
        self.not_finite = 0

    def take(self, step: int, value: float) -> None:
        """Take the next value."""
        self.last = (step, value)
        if math.isfinite(value):
            self.lowest, self.highest = min(self.lowest, value), max(self.highest, value)
        else:
            self.not_finite += 1

    def shown(self, name: str) -> DigestScalar:
        """Return what a digest shows."""
        return DigestScalar(
            name=name,
            first_step=self.first[0],
            first=_finite(self.first[1]),
            last_step=self.last[0],
            last=_finite(self.last[1]),
            lowest=_finite(self.lowest),
            highest=_finite(self.highest),
            not_finite=self.not_finite,
        )


def _gap(rank: int, gap: dict[str, Any]) -> str:
    steps = f"steps {gap.get('first_step')} to {gap.get('last_step')}"
    return f"rank {rank}: {gap.get('sink')} lacks {steps}: {gap.get('reason')}"


def _most(run: RecordedRun, key: str) -> float | None:
    found = [status["cost"][key] for status in run.ranks.values() if key in status.get("cost", {})]
    return max(found, default=None)


def _last_step(run: RecordedRun) -> int | None:
    steps = [status["step"] for status in run.ranks.values() if status.get("step", -1) >= 0]
    return max(steps, default=None)


def _name(name: Any, room: _Room) -> str:
    return shorten(plain(str(name)).replace("\n", " "), room.text)


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
