"""Reads single keys from the terminal while a view is live, and says what they choose."""

import contextlib
import os
import select
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

try:
    import termios
    import tty
except ImportError:  # Windows: the view is live all the same, and Ctrl-C ends it
    termios = None  # type: ignore[assignment]

KEYS: Final = {
    b"\x1b[A": "up",
    b"\x1bOA": "up",
    b"k": "up",
    b"\x1b[B": "down",
    b"\x1bOB": "down",
    b"j": "down",
    b"\r": "enter",
    b"\n": "enter",
    b"\x1b": "back",
    b"\x7f": "back",
    b"q": "quit",
}
"""What each key sends, and its meaning; terminals send the arrows in one of two forms."""


@dataclass(frozen=True)
class ChosenIncident:
    """The incident that is chosen, whether it is open, and whether the view ends."""

    position: int = 0
    is_open: bool = False
    is_over: bool = False

    def after(self, key: str, count: int) -> "ChosenIncident":
        """Return the choice after a key; there are `count` incidents.

        >>> ChosenIncident(0).after("down", 2).position, ChosenIncident(1).after("down", 2).position
        (1, 1)
        >>> ChosenIncident(0).after("enter", 2).is_open, ChosenIncident(0).after("enter", 0).is_open
        (True, False)
        """
        if key in {"up", "down"}:
            moved = self.position + (1 if key == "down" else -1)
            return replace(self, position=max(0, min(moved, count - 1)))
        if key == "enter":
            return replace(self, is_open=bool(count) and not self.is_open)
        if key in {"back", "quit"} and self.is_open:
            return replace(self, is_open=False)
        return replace(self, is_over=key == "quit")


def keys_in(data: bytes) -> list[str]:
    r"""Return the meanings of the keys in what a terminal sent; other keys mean nothing.

    >>> keys_in(b"\x1b[A\x1b[Bxq"), keys_in(b"\x1b")
    (['up', 'down', 'quit'], ['back'])
    """
    found = []
    while data:
        known = next((sent for sent in KEYS if data.startswith(sent) and (sent != b"\x1b" or data == sent)), None)
        if known is not None:
            found.append(KEYS[known])
        data = data[len(known or b"x") :]
    return found


class Keyboard:
    """The keys of this process' terminal; without a terminal it only waits."""

    def __init__(self) -> None:
        self.is_there = termios is not None and sys.stdin is not None and sys.stdin.isatty()

    @contextlib.contextmanager
    def listening(self) -> Iterator["Keyboard"]:
        """Take each key at once and unseen; the terminal is as before afterwards."""
        if not self.is_there:
            yield self
            return
        before = termios.tcgetattr(sys.stdin.fileno())
        try:
            tty.setcbreak(sys.stdin.fileno())  # Ctrl-C stays a signal
            yield self
        finally:
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, before)

    def wait(self, seconds: float) -> list[str]:
        """Return the keys pressed, at the latest after `seconds`."""
        if not self.is_there:
            time.sleep(seconds)
            return []
        ready, _, _ = select.select([sys.stdin.fileno()], [], [], seconds)
        if not ready:
            return []
        data = os.read(sys.stdin.fileno(), 64)
        if not data:  # the terminal is gone
            self.is_there = False
        return keys_in(data)
