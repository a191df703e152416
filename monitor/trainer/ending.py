"""Ends a run: closes monitors at the interpreter's exit, and writes the last status if nothing else can."""

import atexit
import sys
import time
import weakref
from pathlib import Path
from typing import Final, Protocol

from trainsentry.exporters.files.json_files import SCHEMA_VERSION, replace_json
from trainsentry.monitor.recorder import messages
from trainsentry.monitor.recorder.link import CLOSED
from trainsentry.monitor.trainer.counters import counters_of
from trainsentry.monitor.trainer.step_loop import StepLoop

FLUSH_SECONDS: Final = 60.0
"""Seconds that `flush` and `close` wait for the recorder; it writes a ring of 16 MB in a second or two."""

LONGEST_REASON: Final = 300
"""Characters of the reason of an end in `status.json`."""


class Closable(Protocol):
    """A monitor that can be closed at the interpreter's exit."""

    def close(self) -> None:
        """Close it."""


_open: "weakref.WeakSet[Closable]" = weakref.WeakSet()


def close_at_exit(monitor: Closable) -> None:
    """Close `monitor` at the interpreter's exit, if it still exists."""
    if not _open:
        atexit.register(_at_exit)
    _open.add(monitor)


def open_monitors() -> bool:
    """Whether a monitor watches in this process."""
    return bool(_open)


def cancel_close_at_exit(monitor: Closable) -> None:
    """Do not close `monitor` at exit: it is closed already."""
    _open.discard(monitor)
    if not _open:
        atexit.unregister(_at_exit)


def _at_exit() -> None:
    for monitor in list(_open):
        monitor.close()


def how_it_ended(stopped: str | None) -> dict[str, str]:
    """Return `ended` (`finished`, `stopped` or `crashed`) and `why`, for `status.json`, while the monitor closes.

    `stopped` is the reason of a stop that this run was given. Else the exception decides with which the monitor is
    left: the one in flight (`with`, `try … finally`), or at exit the one that ended the script. SystemExit is an end
    like any other, and an interactive session keeps old exceptions, which ended nothing.
    """
    if stopped is not None:
        return {"ended": "stopped", "why": stopped}
    error = sys.exc_info()[1]
    kind = type(error) if error is not None else getattr(sys, "last_type", None)
    if error is None and (hasattr(sys, "ps1") or sys.flags.interactive):
        kind = None
    if kind is None or issubclass(kind, (SystemExit, GeneratorExit, StopIteration)):
        return {"ended": "finished"}
    if issubclass(kind, KeyboardInterrupt):
        return {"ended": "stopped", "why": kind.__name__}
    if error is None:
        error = getattr(sys, "last_value", None)
    return {"ended": "crashed", "why": f"{kind.__name__}: {error}"[:LONGEST_REASON]}


def end_recorder(loop: StepLoop, root: Path) -> None:
    """Flush the recorder, announce the last incidents, and end the recorder.

    If it does not answer the flush, the second wait is skipped; the link writes the records that it leaves.
    """
    loop.publish(wait=True)
    stop = loop.stopped if loop.stopped is not None and loop.stopped.step >= loop.step - 1 else None
    loop.ended = how_it_ended(stop.reason if stop is not None else None)
    loop.counters.send()
    received, answer = loop.link.ask(messages.FLUSH, messages.FLUSHED, FLUSH_SECONDS)
    loop.triggers.receive(received)
    loop.triggers.announce_rest()
    loop.counters.send()
    loop.triggers.receive(loop.link.close(FLUSH_SECONDS if answer is not None else 0.0))
    if loop.link.dead not in {None, CLOSED} and not loop.link.drained:
        _write_last_status(loop, root)


def _write_last_status(loop: StepLoop, root: Path) -> None:
    """Write `status.json` from the trainer: the recorder and the link cannot."""
    status = {
        "schema_version": SCHEMA_VERSION,
        "state": f"recorder dead: {loop.link.dead}",
        "rank": loop.rank,
        "step": loop.step - 1,
        "gaps": loop.link.gaps.to_json(),
        "updated": time.time(),
        **counters_of(loop),
    }
    replace_json(root / f"rank{loop.rank}" / loop.link.settings.file_name("status.json"), status)
