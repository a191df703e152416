"""Writes a digest as Markdown, for a ticket or a chat."""

import time
from collections.abc import Iterator, Sequence

from trainsentry.exporters.report.digest import AbnormalValue, Digest, DigestIncident, DigestScalar
from trainsentry.exporters.short_text import counted, number


def markdown(digest: Digest) -> str:
    """Return a digest as Markdown; its headings are always the same, in the same order."""
    lines = [
        *("# trainsentry: " + _said(digest.verdict.sentence), ""),
        *_run(digest),
        *("", "## Incidents", ""),
        *(_incidents(digest) if digest.incidents else ["None."]),
        *("", "## Scalars", ""),
        *(_scalars(digest.scalars) if digest.scalars else ["None was logged."]),
        *("", "## Ranks", ""),
        *_ranks(digest),
        *("", "## Where to look", ""),
        *(f"- {_said(pointer.what)}: {_name(pointer.where)}" for pointer in digest.pointers),
    ]
    return "\n".join(lines) + "\n"


def _run(digest: Digest) -> Iterator[str]:
    run, monitor = digest.run, digest.monitor
    why = f" ({_said(run.why)})" if run.why else ""
    yield f"- Run: {_name(run.directory)}, {run.state}{why}"
    setup = [part for part in (run.framework, run.accelerator, counted(run.ranks, "rank")) if part]
    yield f"- Setup: {_said(', '.join(setup))}"
    facts = ["no step" if run.last_step is None else f"up to step {run.last_step}"]
    facts += [f"{number(run.step_seconds)} s a step"] if run.step_seconds is not None else []
    facts += [f"started {_moment(run.started)}"] if run.started is not None else []
    facts += [f"last seen {_moment(run.updated)}"] if run.updated is not None else []
    yield f"- Progress: {', '.join(facts)}"
    if monitor.cost_share is not None:
        yield f"- The monitor adds {100 * monitor.cost_share:.2g} % of the training's time"
    if monitor.lag_steps:
        yield f"- The recorder is {counted(monitor.lag_steps, 'step')} ({number(monitor.lag_seconds)} s) behind"
    yield from (f"- Gap on {_said(gap)}" for gap in monitor.gaps)


def _incidents(digest: Digest) -> Iterator[str]:
    for position, incident in enumerate(digest.incidents):
        yield from ([""] if position else [])
        yield from _incident(incident)
    if digest.incidents_left_out:
        yield from ("", f"And {counted(digest.incidents_left_out, 'more incident')}.")


def _incident(incident: DigestIncident) -> Iterator[str]:
    first, last = incident.first_step, incident.last_step
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    yield f"### Incident {incident.id}: {_said(str(incident.severity))}, {steps}"
    yield ""
    yield _said(incident.sentence)
    if incident.repeats:
        yield ""
        yield f"The same first suspect again: step {', '.join(map(str, incident.repeats))}."
    yield ""
    for position, suspect in enumerate(incident.suspects, 1):
        where = f"{_said(suspect.quantity)}, rank {suspect.rank}"
        since = "" if suspect.step is None else f" since step {suspect.step}"
        evidence = f". {_said(suspect.evidence)}" if suspect.evidence else ""
        yield f"{position}. {_name(suspect.name)} ({where}): {_said(str(suspect.kind))}{since}{evidence}"
    if incident.first_values:
        yield from ("", "First abnormal values:", "")
        yield from map(_value, incident.first_values)
    if incident.actions:
        yield from ("", f"The monitor's reaction: {_said('; '.join(incident.actions))}.")


def _value(found: AbnormalValue) -> str:
    value = "not finite" if found.value is None else number(found.value)
    usual = "" if found.usual is None else f", usually {number(found.usual)}"
    what = f"{_said(found.quantity)} of {_name(found.name)}, rank {found.rank}"
    return f"- step {found.step}: {_said(str(found.statistic))} of the {what}: {value}{usual}"


def _scalars(scalars: Sequence[DigestScalar]) -> Iterator[str]:
    yield "| name | first | last | lowest | highest | not finite |"
    yield "|---|---|---|---|---|---|"
    for s in scalars:
        ends = (f"{_number(s.first)} (step {s.first_step})", f"{_number(s.last)} (step {s.last_step})")
        yield f"| {s.name} | {' | '.join(ends)} | {_number(s.lowest)} | {_number(s.highest)} | {s.not_finite} |"


def _ranks(digest: Digest) -> Iterator[str]:
    yield "| rank | state | step | anomalies | overflows | skipped | trouble |"
    yield "|---|---|---|---|---|---|---|"
    for line in digest.ranks:
        counts = (line.step, line.anomalies, line.overflow_steps, line.skipped_steps)
        trouble = _said(", ".join(line.troubles))
        yield f"| {line.rank} | {line.state} | {' | '.join(map(number, counts))} | {trouble} |"
    if digest.ranks_left_out:
        yield from ("", f"And {counted(digest.ranks_left_out, 'more rank')}.")


def _said(text: str) -> str:
    """Return a text that a ticket shows as it is: no HTML, no cell of a table ends in it."""
    return text.replace("\n", " ").replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")


def _name(text: str) -> str:
    """Return a name as code, so that its underscores and brackets stay."""
    return f"`{text.replace('`', chr(39))}`"


def _number(value: float | None) -> str:
    return "not finite" if value is None else number(value)


def _moment(seconds: float) -> str:
    """Format a time in seconds since the epoch; a time outside the calendar stays a number."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return number(seconds)
