"""Drives a headless Chromium through its debugging protocol: a page is opened, asked and looked at."""

import asyncio
import base64
import contextlib
import itertools
import json
import re
import shutil
import subprocess
import tempfile

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")

WAIT = 60.0
"""Seconds that a page may take to show what a test waits for, on a busy machine."""


class Page:
    """An open page; `problems` are the errors of its scripts and console, `requests` the addresses it asked for."""

    def __init__(self, socket):
        self._socket = socket
        self._numbers = itertools.count(1)
        self._loop = asyncio.get_running_loop()
        self.problems = []
        self.requests = []

    async def call(self, method, **settings):
        """Call a method of the protocol."""
        number = next(self._numbers)
        await self._socket.write_message(json.dumps({"id": number, "method": method, "params": settings}))
        while True:
            text = await asyncio.wait_for(self._socket.read_message(), WAIT)
            answer = json.loads(text)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def _note(self, event):
        details = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(details["exceptionDetails"])[:500])
        if event.get("method") == "Log.entryAdded" and details["entry"]["level"] == "error":
            self.problems.append(details["entry"]["text"])
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(details["request"]["url"])

    async def ask(self, expression):
        """Return the value of a JavaScript expression in the page."""
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def wait_for(self, expression):
        """Wait until an expression is true; fail with the page's text if it never is."""
        end = self._loop.time() + WAIT
        while not await self.ask(expression):
            if self._loop.time() > end:
                text = await self.ask("document.body.innerText")
                raise AssertionError(f"never true: {expression}\n{self.problems}\n{text}")
            await asyncio.sleep(0.1)

    async def look(self, path, *, whole=True):
        """Save a picture of the page, of its whole length unless told otherwise."""
        found = await self.call("Page.captureScreenshot", captureBeyondViewport=whole, format="png")
        path.write_bytes(base64.b64decode(found["data"]))


@contextlib.asynccontextmanager
async def opened(address, *, width=1400, height=900, dark=False):
    """Open a page in a browser of its own."""
    from tornado.httpclient import AsyncHTTPClient
    from tornado.websocket import websocket_connect

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0",
            "--remote-allow-origins=*", f"--user-data-dir={profile}", "about:blank",
        ]  # fmt: skip
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as browser:
            try:
                line = next(line for line in browser.stderr if "DevTools listening" in line)
                port = re.search(r":(\d+)/", line)[1]
                client = AsyncHTTPClient()
                tabs = json.loads((await client.fetch(f"http://127.0.0.1:{port}/json")).body)
                tab = next(tab for tab in tabs if tab["type"] == "page")
                page = Page(await websocket_connect(tab["webSocketDebuggerUrl"], max_message_size=1 << 28))
                for domain in ("Page", "Runtime", "Log", "Network"):
                    await page.call(f"{domain}.enable")
                size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
                await page.call("Emulation.setDeviceMetricsOverride", **size)
                scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
                await page.call("Emulation.setEmulatedMedia", features=scheme)
                await page.call("Page.navigate", url=address)
                yield page
            finally:
                browser.kill()
