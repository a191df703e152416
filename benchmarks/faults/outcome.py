"""What a monitor said of a run, held against what it should have said."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from case import Case


@dataclass(frozen=True)
class Outcome:
    """One run: `delay` in steps from the fault to the first alarm (None: not found); `early`: incidents before it."""

    case: str
    family: str
    optimizer: str
    seed: int
    collect: str
    detected: bool = False
    delay: int | None = None
    first_right: bool = False
    within_three: bool = False
    kind_right: bool = False
    block_right: bool = False
    incidents: int = 0
    early: int = 0
    notes: int = 0
    steps: int = 0
    said: str = ""
    said_early: str = ""
    same_from_tables: bool | None = None
    same_anew: bool | None = None
    others: dict[str, dict[str, Any]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a JSON-lines file; none when there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def first_from_tables(out: Path, *, alone: bool) -> list[tuple[str, str, int]]:
    """Return name, quantity and rank of each incident's first suspect, the tables judged anew.

    With `alone` nothing else is known; without, what the comparison of ranks found while they ran is known too.
    """
    from trainsentry.monitor.offline.history import diagnose

    for path in out.glob("rank*/anomalies.jsonl") if alone else ():
        path.unlink()
    found = diagnose(sorted(out.glob("rank*")), lambda *_: None, anew=True)
    return [(i.suspects[0].name, i.suspects[0].quantity, i.suspects[0].rank) for i in found]


def first_live(out: Path) -> list[tuple[str, str, int]]:
    """Return the same of the incidents that the run itself has written."""
    incidents = {line["id"]: line for line in read_lines(out / "incidents.jsonl")}.values()
    return [(i["suspects"][0]["name"], i["suspects"][0]["quantity"], i["suspects"][0]["rank"]) for i in incidents]


def judge(case: Case, who: dict[str, Any], out: Path, fault_step: int, *, faulty: bool, steps: int) -> Outcome:
    """Read a run's incidents and say whether they are right; `who` says which run it was."""
    newest = {line["id"]: line for line in read_lines(out / "incidents.jsonl")}.values()
    incidents = [i for i in newest if i["severity"] != "note"]  # nobody is told of notes
    notes = len(newest) - len(incidents)
    alarms = [a for d in out.glob("rank*") for a in read_lines(d / "anomalies.jsonl") if a.get("alarm", True)]
    alarms += [{"step": i["step"]} for i in incidents if i["kind"] == "hang"]
    if not faulty or case.expect.silent:
        said = "; ".join(i["summary"] for i in incidents)
        return Outcome(**who, incidents=len(incidents), early=len(incidents), notes=notes, steps=steps, said=said)
    times = sorted(a["step"] for a in alarms)
    late = [t for t in times if t >= fault_step]
    early = [i for i in incidents if i["last_seen"] < fault_step]
    after = [i for i in incidents if i["last_seen"] >= fault_step]
    delay = late[0] - fault_step if late and after else None
    detected = delay is not None and delay <= case.expect.within
    said_early = "; ".join(i["summary"] for i in early)
    if not after:
        return Outcome(**who, early=len(early), notes=notes, steps=steps, said_early=said_early)
    first = after[0]
    suspects = first["suspects"]
    right = [case.expect.is_right(s, who["family"]) for s in suspects]
    wanted = case.expect.names.get(who["family"], case.expect.names.get("", ("*",)))[0]
    block = ".".join(wanted.split(".")[:2])
    shown = [(s["name"], s["quantity"], s["kind"], s["step"], round(s["score"])) for s in suspects[:4]]
    said = f"{first['summary']} || {shown}"
    return Outcome(
        **who,
        detected=detected,
        delay=delay,
        first_right=detected and right[0],
        within_three=detected and any(right[:3]),
        kind_right=detected and first["kind"] in case.expect.kinds,
        block_right=detected and (block == "*" or first["name"].startswith(block) or right[0]),
        incidents=len(after),
        early=len(early),
        notes=notes,
        steps=steps,
        said=said,
        said_early=said_early,
    )
