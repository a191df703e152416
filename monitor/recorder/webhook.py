"""Sends incidents to a webhook, each in a detached process that records the outcome in `deliveries.jsonl`."""

import contextlib
import http.client
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from trainsentry.exporters.files.json_files import append_lines

DELIVERIES: Final = "deliveries.jsonl"
"""File of the output directory with one line per incident sent."""

FIRST_PAUSE: Final = 1.0
"""Seconds before the second try; each pause is twice the one before."""

MAX_PAUSE: Final = 60.0
"""Longest pause between two tries, in seconds: an alert that is later than this is of little use."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: the token belongs to one address, and a redirected POST would arrive as a GET."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Return no request, so that the redirect's own status is the answer."""


_opener = urllib.request.build_opener(_NoRedirect)


def payload_of(incident: Mapping[str, Any], style: str) -> bytes:
    """Return the request's body: the incident's line (`json`), or its sentence in the form chats take (`text`)."""
    if style == "text":
        where = f"{incident['name']} ({incident['quantity']}, rank {incident['rank']})"
        return json.dumps({"text": f"{incident['severity']}: {incident['summary']}\nFirst suspect: {where}"}).encode()
    return json.dumps({"type": "trainsentry.incident", "incident": dict(incident)}).encode()


def deliver(settings: Mapping[str, Any], incident: Mapping[str, Any]) -> tuple[bool, int, str]:
    """Send an incident; return whether it arrived, the number of tries, and the outcome of the last one."""
    url = os.environ.get(settings["url_env"], "")
    if not url.startswith(("http://", "https://")):
        return False, 0, f"{settings['url_env']} holds no http address"
    headers = {"Content-Type": "application/json", "User-Agent": "trainsentry"}
    token = os.environ.get(settings["token_env"] or "", "")
    if token:
        headers["Authorization"] = f"Bearer {token}"
    said, pause = "", FIRST_PAUSE * settings.get("pause", 1.0)
    for attempt in range(1, settings["retries"] + 2):
        request = urllib.request.Request(url, payload_of(incident, settings["style"]), headers)  # noqa: S310 - checked
        try:
            with _opener.open(request, timeout=settings["timeout"]) as answer:
                return True, attempt, f"status {answer.status}"
        except urllib.error.HTTPError as error:
            said = f"status {error.code}"
            if error.code < 500 and error.code not in {408, 429}:
                return False, attempt, said  # another try would get the same answer
        except (OSError, ValueError, http.client.HTTPException) as error:
            said = type(error).__name__  # its text may hold the address
        if attempt <= settings["retries"]:
            time.sleep(min(pause, MAX_PAUSE))
            pause *= 2
    return False, settings["retries"] + 1, said


def main() -> None:
    """Send the incident on standard input and append the outcome to `deliveries.jsonl`."""
    order = json.loads(sys.stdin.buffer.read())
    arrived, tries, said = deliver(order["settings"], order["incident"])
    line = {"incident": order["incident"]["id"], "sink": "webhook", "arrived": arrived, "tries": tries, "said": said}
    append_lines(Path(order["root"]) / DELIVERIES, [line | {"time": time.time()}])


if __name__ == "__main__":
    main()


DELIVERY: Final = "trainsentry.monitor.recorder.webhook"


def begin_alert(settings: Mapping[str, Any], root: str, incident: Mapping[str, Any]) -> None:
    """Start the process that sends an incident; it reads the address from the environment, where alone it stands."""
    order = json.dumps({"settings": dict(settings), "root": root, "incident": dict(incident)})
    with contextlib.suppress(OSError):
        child = subprocess.Popen(
            [sys.executable, "-m", DELIVERY],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert child.stdin is not None
        child.stdin.write(order.encode())
        child.stdin.close()
