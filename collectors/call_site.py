"""Where in the user's code something is called from."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

_OURS: Final = str(Path(__file__).resolve().parents[1])


def call_site(libraries: Sequence[str]) -> str:
    """Return `<file>:<function>` of the innermost caller outside of these libraries and ourselves."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if not str(path).startswith(_OURS) and not any(part in libraries for part in path.parts):
            return f"{path}:{frame.f_code.co_name}"
        frame = frame.f_back
    return ""
