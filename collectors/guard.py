"""How hooks stay harmless: an exception of ours stops at the guard, and a copied model carries inert hooks."""

import logging
import os
import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns, time
from typing import Any, Final

logger = logging.getLogger("trainsentry")


class PassThrough(RuntimeError):
    """An exception that is meant for the training loop and goes through every guard."""


class _Everything(set[str]):
    """A set that contains every part: what a forked child has switched off."""

    def __contains__(self, part: object) -> bool:
        return True


_guards: "weakref.WeakSet[Guard]" = weakref.WeakSet()


def _switch_off_in_child() -> None:
    for guard in _guards:
        guard.disabled = _Everything()
        guard.in_training_process = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_switch_off_in_child)


@dataclass
class Failure:
    """How often a part failed and what it said last; the traceback is logged once."""

    count: int
    last: str
    since: float


class Guard:
    """Runs parts of the monitor so that their failures are logged once, counted, and contained.

    A part that fails is switched off. With `strict`, exceptions go through. While `held` is above zero nothing runs,
    as when a device records what it is asked to do instead of doing it. `interrupted` names what has ended a part in
    the middle, such as a Ctrl-C, and stays until somebody has cleared up. In a forked child every part is off: the
    child of a training process (a data loader's worker) is not the training process.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self.failures: dict[str, Failure] = {}
        self.disabled: set[str] = set()
        self.spent_ns = 0
        self.spent_by: Counter[str] = Counter()
        self.in_training_process = True
        self.held = 0
        self.interrupted: str | None = None
        self._depth = 0
        self._since = 0
        _guards.add(self)

    def report(self, part: str, error: BaseException) -> None:
        """Count a failure of `part`, log it when it is the first, and switch the part off."""
        known = self.failures.get(part)
        message = f"{type(error).__name__}: {error}"
        if known is None:
            # What the file system says needs no traceback.
            trace = message if isinstance(error, OSError) else "".join(traceback.format_exception(error))
            self.failures[part] = Failure(1, message, time())
            logger.error("trainsentry: %s failed and is switched off; training goes on. %s", part, trace)
        else:
            known.count += 1
            known.last = message
        self.disabled.add(part)

    def refuse(self, part: str, error: Exception) -> None:
        """Count something that could not be taken, log the first of its kind, and go on."""
        part = f"{part} ({type(error).__name__})"
        if part not in self.failures:
            logger.warning("trainsentry: %s: left out, and so are others like it. %s", part, error)
        self.note_failure(part, str(error))

    def warn_once(self, part: str, message: str) -> None:
        """Log something that the user should know, once, and keep it for `status.json`."""
        if part not in self.failures:
            logger.warning("trainsentry: %s", message)
        self.note_failure(part, message)

    def note_failure(self, part: str, message: str) -> None:
        """Count a failure that was logged elsewhere and stays where it was, such as an exporter's."""
        known = self.failures.setdefault(part, Failure(0, message, time()))
        known.count += 1
        known.last = message

    def run(self, part: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function(*args)`; return None when the part is off or fails, or the guard is held.

        Raises:
            PassThrough: always let through.
            Exception: whatever was raised, when the guard is strict.

        """
        if self.held or part in self.disabled:
            return None
        start = perf_counter_ns()
        if self._depth == 0:
            self._since = start
        self._depth += 1
        try:
            return function(*args)
        except PassThrough:
            raise
        except Exception as error:
            if self.strict:
                raise
            self.report(part, error)
            return None
        except BaseException as error:  # Ctrl-C: whatever was under way is half done
            self.interrupted = type(error).__name__
            raise
        finally:
            self._depth -= 1
            elapsed = perf_counter_ns() - start
            self.spent_by[part] += elapsed
            if self._depth == 0:
                self.spent_ns += elapsed

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Have every part off for a while."""
        disabled, self.disabled = self.disabled, _Everything()
        try:
            yield
        finally:
            self.disabled = disabled

    def spent_ns_so_far(self) -> int:
        """Return the nanoseconds spent in guarded calls, with those of the call under way."""
        return self.spent_ns + (perf_counter_ns() - self._since if self._depth else 0)


INERT: Final = partial(sys.audit, "trainsentry.hook_of_a_copy")
"""What a copy of a watched model carries in the place of a hook.

It takes any arguments, does nothing and returns None. It is made of the standard library alone, so that a
pickled model loads on a machine without trainsentry.
"""


class InertWhenCopied:
    """Base of callable hooks: `copy.deepcopy` and `pickle` put `INERT` in their place."""

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return INERT

    def __reduce__(self) -> Any:
        return partial, (sys.audit, "trainsentry.hook_of_a_copy")
