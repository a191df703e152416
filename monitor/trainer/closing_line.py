"""Prints what is left to say as a run ends: steps, incidents, the monitor's cost, and where the records are."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from trainsentry.anomaly.incident import NOTE, Incident
from trainsentry.exporters.short_text import counted
from trainsentry.monitor.recorder.sinks.gaps import sentence_of
from trainsentry.monitor.trainer.first_steps import MISSING_CALL, NO_STEP

if TYPE_CHECKING:
    from trainsentry.monitor.trainer.step_loop import StepLoop

SHOWN: Final = 3
"""Incidents that the end repeats; the report has all."""


def print_closing_line(loop: "StepLoop", output_dir: str, incidents: Sequence[Incident]) -> None:
    """Print a line to standard error, and one for each of the worst `incidents`, by number; they come worst first."""
    cost, lines = loop.overhead.cost, []
    watched = f"{counted(loop.steps, 'step')} watched" if loop.steps else _no_step(loop)
    added = ""
    if cost.steps:
        each = 1e3 * cost.added / cost.steps
        added = f"; the monitor added {each:.2f} ms a step, {cost.share:.2%} of the training's own time"
        if loop.link.recorder_seconds:
            added += f", and its recorder used {loop.link.recorder_seconds:.1f} s of processor time beside it"
    noted = sum(each.severity == NOTE for each in incidents)
    incidents = [each for each in incidents if each.severity != NOTE]
    found = counted(len(incidents), "incident") + (f", {counted(noted, 'note')}" if noted else "")
    steps, seconds = loop.triggers.lag
    if steps:
        added += f"; alarms came up to {counted(steps, 'step')} ({seconds:.1f} s) late"
    lines.append(f"{watched}, {found}{added}. {_where(loop, output_dir)}")
    shown = sorted(incidents[:SHOWN], key=lambda each: each.id)
    lines += [f"incident {each.id}{_mark(each, incidents)}: {each.summary}" for each in shown]
    if incidents:
        more = f"{len(incidents) - SHOWN} more; " if len(incidents) > SHOWN else ""
        lines.append(f"{more}next: trainsentry report {output_dir}")
    if sys.stderr is not None:  # as in a daemon
        sys.stderr.write("".join(f"trainsentry: {line}\n" for line in lines))


def _mark(incident: Incident, worst_first: Sequence[Incident]) -> str:
    return " (the worst)" if len(worst_first) > 1 and incident is worst_first[0] else ""


def _no_step(loop: "StepLoop") -> str:
    """Say that no step was recorded, and which call is missing unless a warning has said so."""
    return "no step was recorded" if NO_STEP in loop.guard.failures else f"no step was recorded ({MISSING_CALL})"


def _where(loop: "StepLoop", output_dir: str) -> str:
    if loop.link.nothing_written is not None:
        return f"Nothing could be written to {output_dir}: {loop.link.nothing_written}"
    gaps = loop.link.gaps.to_json()
    return f"Records are in {output_dir}" + (f", but not all: {sentence_of(gaps)}" if gaps else "")
