"""Serves a folder by the real command, and asks it over HTTP."""

import contextlib
import http.client
import json
import os
import re
import subprocess
import sys
from urllib.parse import urlencode


class Served:
    """A running server: `ask` returns status and answer, `raw` what came back for any request."""

    def __init__(self, port):
        self.port = port
        self.address = f"http://127.0.0.1:{port}/"

    def raw(self, path, headers=None, method="GET"):
        """Return status, headers and body of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.putrequest(method, path, skip_host=bool(headers and "Host" in headers))
            for name, value in (headers or {}).items():
                connection.putheader(name, value)
            connection.endheaders()
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()

    def ask(self, question, **query):
        """Return status and answer of a question."""
        status, _, body = self.raw(f"/api/{question}?{urlencode(query)}")
        return status, json.loads(body)


@contextlib.contextmanager
def served(folder, *options):
    """Serve a folder on a free port by `trainsentry serve`, in a process of its own."""
    command = [sys.executable, "-u", "-m", "trainsentry", "serve", str(folder), "--port", "0", *options]
    environment = {**os.environ, "COLUMNS": "200"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=environment) as process:
        try:
            yield Served(int(re.search(r":(\d+)/", process.stdout.readline())[1]))
        finally:
            process.terminate()
