"""Measures how long headless Chromium takes to load a page up to a given content."""

import asyncio
import base64
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tornado.websocket import WebSocketClientConnection, websocket_connect

PORT = 9333


def seconds_until(
    url: str, expression: str, limit: float, picture: Path | None = None, size: tuple[int, int] = (1900, 1000)
) -> float | None:
    """Return the seconds until a JavaScript expression is true on a page; None after `limit` seconds.

    `picture` is the file of a screenshot taken three seconds later, of a window of `size` pixels.
    """
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        return None
    flags = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--window-size={size[0]},{size[1]}",
    ]
    command = [chromium, *flags, f"--remote-debugging-port={PORT}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        return asyncio.run(_watch(url, expression, limit, picture))
    finally:
        process.kill()
        process.wait()


async def _watch(url: str, expression: str, limit: float, picture: Path | None) -> float | None:
    socket = await _connect()
    begin = time.perf_counter()
    await _call(socket, "Page.navigate", url=url)
    seconds = None
    while time.perf_counter() - begin < limit:
        answer = await _call(socket, "Runtime.evaluate", expression=expression, returnByValue=True)
        if answer.get("result", {}).get("result", {}).get("value"):
            seconds = time.perf_counter() - begin
            break
        await asyncio.sleep(0.1)
    if picture is not None:
        await asyncio.sleep(3)
        shot = await _call(socket, "Page.captureScreenshot", format="png")
        picture.write_bytes(base64.b64decode(shot["result"]["data"]))
    return seconds


async def _connect() -> WebSocketClientConnection:
    for _ in range(100):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/json") as answer:
                pages = json.load(answer)
            page = next(page for page in pages if page["type"] == "page")
            return await websocket_connect(page["webSocketDebuggerUrl"], max_message_size=1 << 27)
        except (urllib.error.URLError, StopIteration, OSError):
            await asyncio.sleep(0.2)
    raise TimeoutError("Chromium did not answer")


async def _call(socket: WebSocketClientConnection, method: str, **params: Any) -> dict[str, Any]:
    await socket.write_message(json.dumps({"id": 1, "method": method, "params": params}))
    while True:
        message = await socket.read_message()
        answer: dict[str, Any] = json.loads(message or "{}")
        if answer.get("id") == 1:
            return answer
