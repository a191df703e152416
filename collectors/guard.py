"""Keeps hooks harmless: the guard contains the monitor's exceptions, and a copied model carries inert hooks."""

import logging
import os
import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns, time
from typing import Any, Final

logger = logging.getLogger("trainsentry")


class PassThrough(RuntimeError):
    """An exception for the training loop, which every guard lets through."""


class _Everything(set[str]):
    """A set that contains every part, so that all are switched off."""

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
    """A part's failures: how many, the last message, and the first one's time in seconds since the epoch."""

    count: int
    last: str
    since: float


class Guard:
    """Runs parts of the monitor, contains their failures, counts them, and logs the first of each part.

    A part that fails is switched off. With `strict`, exceptions go through. While `suspended` is above zero no part
    runs, as while a device captures a graph. `interrupted` names the exception that ended a part in the middle, such
    as KeyboardInterrupt, until the caller has recovered. In a forked child every part is off: a data loader's worker
    is not the training process.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self.failures: dict[str, Failure] = {}
        self.disabled: set[str] = set()
        self.spent_ns = 0
        self.spent_by: Counter[str] = Counter()
        self.in_training_process = True
        self.suspended = 0
        self.interrupted: str | None = None
        self._depth = 0
        self._since = 0
        _guards.add(self)

    def report(self, part: str, error: BaseException) -> None:
        """Count a failure of `part`, log it when it is the first, and switch the part off."""
        known = self.failures.get(part)
        message = f"{type(error).__name__}: {error}"
        if known is None:
            # The message of a file system error is enough.
            trace = message if isinstance(error, OSError) else "".join(traceback.format_exception(error))
            self.failures[part] = Failure(1, message, time())
            _say(logger.error, "trainsentry: %s failed and is switched off; training goes on. %s", part, trace)
        else:
            known.count += 1
            known.last = message
        self.disabled.add(part)

    def refuse(self, part: str, error: Exception) -> None:
        """Count an object that cannot be read, and log the first of each kind; the part stays on."""
        part = f"{part} ({type(error).__name__})"
        if part not in self.failures:
            _say(logger.warning, "trainsentry: %s: skipped, as are all later ones of this kind. %s", part, error)
        self.note_failure(part, str(error))

    def warn_once(self, part: str, message: str) -> None:
        """Log a message for the user once, and keep it for `status.json`."""
        if part not in self.failures:
            _say(logger.warning, "trainsentry: %s", message)
        self.note_failure(part, message)

    def note_failure(self, part: str, message: str) -> None:
        """Count a failure that another component logged, such as an exporter's; the part stays on."""
        known = self.failures.setdefault(part, Failure(0, message, time()))
        known.count += 1
        known.last = message

    def run(self, part: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function(*args)`; return None when the part is off or fails, or the guard is suspended.

        Raises:
            PassThrough: always.
            Exception: any that the function raises, when the guard is strict.

        """
        if self.suspended or part in self.disabled:
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
        except BaseException as error:  # Ctrl-C: the function is half done
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
        """Switch every part off inside the `with` block."""
        disabled, self.disabled = self.disabled, _Everything()
        try:
            yield
        finally:
            self.disabled = disabled

    def spent_ns_so_far(self) -> int:
        """Return the nanoseconds spent in guarded calls, including the current one."""
        return self.spent_ns + (perf_counter_ns() - self._since if self._depth else 0)


def _say(log: Callable[..., None], *message: object) -> None:
    """Log a message; a handler of the user's may raise, and must not end the training by what the monitor says."""
    with suppress(Exception):
        log(*message)


INERT: Final = partial(sys.audit, "trainsentry.hook_of_a_copy")
"""Replaces a hook in a copy of a watched model.

It takes any arguments, does nothing and returns None. It uses only the standard library, so that a pickled model
loads on a machine without trainsentry.
"""


class InertWhenCopied:
    """Base of callable hooks, which `copy.deepcopy` and `pickle` replace by `INERT`.

    `__torch_unserializable__` tells torch to leave a tensor's hook out of a file without a warning.
    """

    __slots__ = ()
    __torch_unserializable__ = True

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return INERT

    def __reduce__(self) -> Any:
        return partial, (sys.audit, "trainsentry.hook_of_a_copy")
