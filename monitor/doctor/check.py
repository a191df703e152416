"""One line of the doctor's table."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from trainsentry.exporters.short_text import shorten

State = Literal["OK", "slow", "missing", "wrong"]
"""OK: it works. slow: it works by a slower way. missing: it is not there, and something is lost. wrong: it fails."""

REPORT: Final = "attach the file of `trainsentry doctor --out doctor.json` to a bug report"
"""The advice where a part of ours fails."""

MAX_TEXT: Final = 300
"""Characters of an error's text in the table and in the file."""


@dataclass(frozen=True)
class Check:
    """What was looked at, how it is, what was found, and what to do about it."""

    name: str
    state: State
    found: str
    advice: str = ""


def attempt(name: str, check: Callable[[], "Check | Iterable[Check]"]) -> Iterator[Check]:
    """Yield the checks that a function makes, and one that is wrong where it raises."""
    try:
        made = check()
        yield from (made,) if isinstance(made, Check) else made
    except Exception as error:  # noqa: BLE001 - whatever a device or a driver raises is a finding
        yield Check(name, "wrong", without_secrets(f"{type(error).__name__}: {error}"), REPORT)


def without_secrets(text: str) -> str:
    """Return a text without the user's folders, addresses and long hexadecimal or base64 words.

    >>> without_secrets("/home/ada/run: token 0123456789abcdef0123456789abcdef from 10.0.0.7")
    '<path>: token <word> from <address>'
    """
    text = text.replace(str(Path.home()), "~")
    text = re.sub(r"(?<![\w<])[~/](?:[\w.+-]+/)*[\w.+-]*\w", "<path>", text)
    text = re.sub(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b", "<address>", text)
    text = re.sub(r"\b[\w.+-]+@[\w.-]+\b", "<address>", text)
    text = re.sub(r"\b(?=\w*\d)[A-Za-z0-9_-]{24,}\b", "<word>", text)
    return shorten(text, MAX_TEXT)
