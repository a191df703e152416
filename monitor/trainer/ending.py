"""How a run ends: at the interpreter's exit, or without a recorder to write the last status."""

import atexit
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
"""How long `flush` and `close` wait for the recorder: a ring of 16 MB is written in a second or two."""


class Closable(Protocol):
    """Something that is closed at the interpreter's exit, unless it was before."""

    def close(self) -> None:
        """Close it."""


_open: "weakref.WeakSet[Closable]" = weakref.WeakSet()


def close_at_exit(monitor: Closable) -> None:
    """Have `monitor` closed at the interpreter's exit, should it still be there."""
    if not _open:
        atexit.register(_at_exit)
    _open.add(monitor)


def is_closed(monitor: Closable) -> None:
    """Note that a monitor need not be closed any more."""
    _open.discard(monitor)
    if not _open:
        atexit.unregister(_at_exit)


def _at_exit() -> None:
    for monitor in list(_open):
        monitor.close()


def end_recorder(loop: StepLoop, root: Path) -> None:
    """Have everything written that was recorded, tell the last incidents, and end the recorder.

    A recorder that does not answer is not waited for twice; what it leaves, the link writes.
    """
    loop.publish(wait=True)
    loop.counters.tell()
    heard, answer = loop.link.ask(messages.FLUSH, messages.FLUSHED, FLUSH_SECONDS)
    loop.triggers.hear(heard)
    loop.triggers.announce_rest()
    loop.counters.tell()
    loop.triggers.hear(loop.link.close(FLUSH_SECONDS if answer is not None else 0.0))
    if loop.link.dead not in {None, CLOSED} and not loop.link.drained:
        _write_last_status(loop, root)


def _write_last_status(loop: StepLoop, root: Path) -> None:
    """Write `status.json` from the trainer, when nothing is left that could do it otherwise."""
    status = {
        "schema_version": SCHEMA_VERSION,
        "state": f"recorder dead: {loop.link.dead}",
        "rank": loop.rank,
    }
    replace_json(
        root / f"rank{loop.rank}" / loop.link.settings.own_name("status.json"),
        {
            **status,
            "step": loop.step - 1,
            "gaps": loop.link.gaps.to_json(),
            "updated": time.time(),
            **counters_of(loop),
        },
    )
