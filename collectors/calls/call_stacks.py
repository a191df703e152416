"""Finds the user's code that made a call: its innermost function, or the whole stack, each stack resolved once."""

import linecache
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

_OURS: Final = str(Path(__file__).parents[2])
_DEMO: Final = str(Path(__file__).parents[2] / "monitor" / "demo")
"""The demonstration trains like a user's script, so its frames count as the user's."""
_DISPATCHERS: Final = frozenset({"handle_torch_function", "__torch_function__"})
"""Functions of torch between a call and the mode that intercepts it."""


def call_site(libraries: Sequence[str]) -> tuple[str, ...]:
    """Return `<file>:<function>` of the innermost caller outside `libraries` and the monitor, and its stack's lines.

    The lines are `<file>:<line>` of that caller and of its own callers. Returns nothing when there is no such caller.
    """
    frame: Any = sys._getframe(1)
    found: list[str] = []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if not str(path).startswith(_OURS) and not any(part in libraries for part in path.parts):
            found += (
                [f"{path}:{frame.f_lineno}"]
                if found
                else [f"{path}:{frame.f_code.co_name}", f"{path}:{frame.f_lineno}"]
            )
        frame = frame.f_back
    return tuple(found)


def is_chosen(site: Sequence[str], patterns: Sequence[str]) -> bool:
    """Whether a call site matches one of shell-style patterns.

    >>> is_chosen(("/job/train.py:main", "/job/train.py:23"), ["*train.py:23"])
    True
    """
    return any(fnmatch(name, pattern) for name in site for pattern in patterns)


class CallStacks:
    """Numbers stacks; `text(number)` returns the lines of one, innermost call first."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[tuple[CodeType, int], ...], int] = {}
        self._by_text: dict[tuple[str, ...], int] = {}
        self._texts: list[tuple[str, ...]] = []
        self._left_out: dict[CodeType, bool] = {}

    def here(self, frame: FrameType | None = None) -> int:
        """Return the number of the stack of `frame`, or of the caller."""
        frame = frame or sys._getframe(1)
        places: list[tuple[CodeType, int]] = []
        current: FrameType | None = frame
        while current is not None:
            code = current.f_code
            left_out = self._left_out.get(code)
            if left_out is None:
                left_out = self._left_out[code] = _is_left_out(code)
            if not left_out:
                places.append((code, current.f_lasti))
            current = current.f_back
        key = tuple(places)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = self._resolve(frame)
        return number

    def text(self, number: int) -> tuple[str, ...]:
        """Return the lines of a stack: file, line and function, then the source line."""
        return self._texts[number]

    def _resolve(self, frame: FrameType | None) -> int:
        lines = []
        while frame is not None:
            code = frame.f_code
            source = linecache.getline(code.co_filename, frame.f_lineno).strip()
            if source and not self._left_out[code]:
                lines.append(f"File {code.co_filename}, line {frame.f_lineno}, in {code.co_name}, \n {source}")
            frame = frame.f_back
        text = tuple(lines)
        if text not in self._by_text:
            self._by_text[text] = len(self._texts)
            self._texts.append(text)
        return self._by_text[text]


def is_ours(code: CodeType) -> bool:
    """Whether code belongs to the monitor."""
    return code.co_filename.startswith(_OURS) and not code.co_filename.startswith(_DEMO)


def _is_left_out(code: CodeType) -> bool:
    return is_ours(code) or code.co_name in _DISPATCHERS
