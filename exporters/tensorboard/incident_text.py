"""Writes incidents as Markdown for TensorBoard's text page."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from trainsentry.exporters.short_text import counted

MOST_SUSPECTS: Final = 5
"""Suspects of an incident in its text; the report has all of them."""

MOST_GAPS: Final = 5
"""Gaps that are told, the newest; `status.json` has all."""


def incident_text(incident: Mapping[str, Any], directory: Path, *, worst: bool) -> str:
    """Return an incident: its sentence, its suspects, what was done, and the command that opens the report."""
    heading = f"### Incident {incident['id']}{' (the worst)' if worst else ''}: {plain(incident['severity'])}, "
    heading += _steps(incident)
    suspects = [
        f"{n}. `{_code(s['name'])}` ({plain(s['quantity'])}, rank {s['rank']}): {plain(s['kind'])}"
        + (f". {plain(s['evidence'])}" if s.get("evidence") else "")
        for n, s in enumerate(incident["suspects"][:MOST_SUSPECTS], 1)
    ]
    parts = [heading, f"**{plain(incident['summary'])}**"]
    if suspects:
        parts += ["Suspects, the likeliest first:", "\n".join(suspects)]
    if incident["actions"]:  # a paragraph between two lists keeps them apart
        parts += ["What was done:", "\n".join(f"- {plain(action)}" for action in incident["actions"])]
    return "\n\n".join([*parts, _report(directory)])


def incident_list(incidents: Sequence[Mapping[str, Any]], directory: Path, worst: int | None) -> str:
    """Return a table of all incidents by number; the worst is marked."""
    rows = [
        f"| {i['id']}{' **worst**' if i['id'] == worst else ''} | {plain(i['severity'])} | {i['first_seen']} "
        f"| `{_code(i['name'])}` | {plain(i['kind'])} |"
        for i in sorted(incidents, key=lambda i: i["id"])
    ]
    head = "| incident | severity | first step | first suspect | kind |\n|---|---|---|---|---|\n"
    return "\n\n".join([head + "\n".join(rows), _report(directory)])


def notes(left_out: str, pictures: Sequence[tuple[int, str]], missing: Sequence[Mapping[str, Any]]) -> str:
    """Return what a run lacks in TensorBoard: single series, pictures by step, and steps that never came."""
    found = [left_out] if left_out else []
    if pictures:
        step, reason = pictures[-1]
        found.append(f"{counted(len(pictures), 'set')} of pictures left out, the last at step {step}: {plain(reason)}.")
    for gap in missing[-MOST_GAPS:]:
        steps = _steps({"first_seen": gap["first_step"], "last_seen": gap["last_step"]})
        found.append(f"Missing here: {steps} ({plain(gap['reason'])}). The export went on after it.")
    if len(missing) > MOST_GAPS:
        found.append(f"{counted(len(missing) - MOST_GAPS, 'more gap')} in `status.json`.")
    return "\n".join(f"- {sentence}" for sentence in found)


def plain(value: Any) -> str:
    """Escape a text for Markdown and HTML."""
    shown = str(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return shown.replace("`", "'").replace("|", "\\|").replace("*", "\\*")


def _code(name: Any) -> str:
    """Escape a name that stands between backticks, where Markdown shows stars as they are."""
    return plain(name).replace("\\*", "*")


def _steps(incident: Mapping[str, Any]) -> str:
    first, last = incident["first_seen"], incident["last_seen"]
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _report(directory: Path) -> str:
    return f"The whole story: `trainsentry report {_code(directory)}`"
