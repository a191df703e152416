"""Assembles the page from its parts: one file that asks for nothing but the answers of its own server.

The maps come drawn, as in a report. The page draws curves with the browser's own canvas: the server has already thinned
them, a library for charts would be fifty times as long as the drawing, and it needs no `unsafe-eval`.
"""

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import Final

from trainsentry.exporters.maps.map_svg import map_script, map_style

SCRIPTS: Final = ("ask.js", "curve.js", "state.js", "modules.js", "main.js")
"""The parts of the script, in order, after that of the maps; they share one scope."""


@cache
def page() -> tuple[str, str]:
    """Return the page and its content security policy, by which nothing but its own script and style runs."""
    folder = Path(__file__).parent / "web"
    style = (folder / "page.css").read_text(encoding="utf-8") + map_style()
    parts = [map_script(), *((folder / name).read_text(encoding="utf-8") for name in SCRIPTS)]
    script = '"use strict";\n' + "\n".join(parts)
    text = (folder / "page.html").read_text(encoding="utf-8")
    text = text.replace("/* style */", style).replace("/* script */", script)
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text, policy


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
