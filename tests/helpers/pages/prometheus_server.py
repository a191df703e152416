"""Runs a real Prometheus server that scrapes one address every second, and asks it."""

import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from urllib.parse import urlencode

import pytest

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")

needs_prometheus = pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus here: a package of Debian")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="no promtool here: it comes with Debian's `prometheus`")

WAIT = 60.0
"""Seconds until an answer is there, on a busy machine."""

SETTINGS = """
global: {scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}
rule_files: [RULES]
scrape_configs:
  - {job_name: training, static_configs: [{targets: ["127.0.0.1:PORT"]}]}
"""


def free_port():
    """Return a port of the loopback interface that nobody has at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


class Server:
    """A running server: `ask` returns the samples of an expression, `until` waits for some."""

    def __init__(self, port):
        self.port = port

    def ask(self, expression):
        """Return (labels, value) of each sample."""
        query = urlencode({"query": expression})
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/v1/query?{query}", timeout=10) as answer:
            found = json.load(answer)["data"]["result"]
        return [(sample["metric"], float(sample["value"][1])) for sample in found]

    def until(self, expression, meanwhile=lambda: time.sleep(0.1)):
        """Return the samples of an expression once there are any; `meanwhile` runs between two questions."""
        end = time.monotonic() + WAIT
        while time.monotonic() < end:
            with contextlib.suppress(OSError):  # the server is starting
                if found := self.ask(expression):
                    return found
            meanwhile()
        raise AssertionError(f"no sample of {expression}")


@contextlib.contextmanager
def scraping(folder, target, rules):
    """Start a server that scrapes a port of this machine and evaluates `rules`; its files lie in `folder`."""
    port = free_port()
    Path(folder).mkdir()
    settings = folder / "prometheus.yml"
    settings.write_text(SETTINGS.replace("RULES", str(rules)).replace("PORT", str(target)))
    command = [
        PROMETHEUS, f"--config.file={settings}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
    ]  # fmt: skip
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            yield Server(port)
        finally:
            process.terminate()
