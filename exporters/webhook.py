"""The webhook exporter: a separate process posts each incident and logs the result; nothing waits for it."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from trainsentry.exporters.exporter import ExporterEntry, ExportPlace, setting
from trainsentry.exporters.files.json_files import append_lines

DELIVERIES: Final = "deliveries.jsonl"
"""File of the output directory with one line per incident sent."""

FIRST_PAUSE: Final = 1.0
"""Seconds before the second try; each pause is twice the one before."""

MAX_PAUSE: Final = 60.0
"""Seconds of the longest pause between two tries."""


@dataclass(frozen=True)
class Webhook:
    """Each incident is posted once, when its ranking has settled. Address and token come from the environment."""

    url_env: str = setting(
        "TRAINSENTRY_WEBHOOK_URL", "Environment variable that holds the address.", pattern=r"^[A-Z_][A-Z0-9_]*$"
    )
    token_env: str | None = setting(
        None, "Environment variable that holds a bearer token.", pattern=r"^[A-Z_][A-Z0-9_]*$"
    )
    style: Literal["json", "text"] = setting(
        "json", "`json` posts the incident's line, `text` its sentence, as chats take it."
    )
    timeout: float = setting(10.0, "Longest time of one try.", unit="seconds", gt=0, le=120)
    retries: int = setting(5, "Tries after the first one.", unit="tries", ge=0, le=20)


def _opener() -> Any:
    """Return what opens requests and follows no redirect: the token belongs to one address."""
    from urllib.request import HTTPRedirectHandler, build_opener  # loads ssl, which only the sending process needs

    class NoRedirect(HTTPRedirectHandler):
        """Makes the redirect's own status the answer."""

        def redirect_request(self, *_: Any, **__: Any) -> None:
            """Return nothing."""

    return build_opener(NoRedirect)


def payload_of(incident: Mapping[str, Any], style: str) -> bytes:
    """Return the body of the request: the incident's line, or its sentence in the form of chats (`text`)."""
    if style == "text":
        where = f"{incident['name']} ({incident['quantity']}, rank {incident['rank']})"
        return json.dumps({"text": f"{incident['severity']}: {incident['summary']}\nFirst suspect: {where}"}).encode()
    return json.dumps({"type": "trainsentry.incident", "incident": dict(incident)}).encode()


def deliver(settings: Mapping[str, Any], incident: Mapping[str, Any]) -> tuple[bool, int, str]:
    """Send an incident; return whether it arrived, the number of tries, and the result of the last one."""
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import Request

    opener = _opener()
    url = os.environ.get(settings["url_env"], "")
    if not url.startswith(("http://", "https://")):
        return False, 0, f"{settings['url_env']} holds no http address"
    headers = {"Content-Type": "application/json", "User-Agent": "trainsentry"}
    token = os.environ.get(settings["token_env"] or "", "")
    if token:
        headers["Authorization"] = f"Bearer {token}"
    result, pause = "", FIRST_PAUSE * settings.get("pause", 1.0)
    for attempt in range(1, settings["retries"] + 2):
        request = Request(url, payload_of(incident, settings["style"]), headers)  # noqa: S310 - checked
        try:
            with opener.open(request, timeout=settings["timeout"]) as answer:
                return True, attempt, f"status {answer.status}"
        except HTTPError as error:
            result = f"status {error.code}"
            if error.code < 500 and error.code not in {408, 429}:
                return False, attempt, result  # another try would end the same
        except (OSError, ValueError, HTTPException) as error:
            result = type(error).__name__  # its text may hold the address
        if attempt <= settings["retries"]:
            time.sleep(min(pause, MAX_PAUSE))
            pause *= 2
    return False, settings["retries"] + 1, result


def begin_alert(settings: Mapping[str, Any], root: str, incident: Mapping[str, Any]) -> None:
    """Start the process that sends an incident; only that process reads the address, and it writes it to no file."""
    task = json.dumps({"settings": dict(settings), "root": root, "incident": dict(incident)})
    with contextlib.suppress(OSError):
        child = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert child.stdin is not None
        child.stdin.write(task.encode())
        child.stdin.close()


def alert_of(block: Webhook, place: ExportPlace) -> Callable[[Mapping[str, Any]], None]:
    """Return the function that starts to send an incident's line."""
    settings, root = asdict(block), str(place.output_dir)
    return lambda incident: begin_alert(settings, root, incident)


WEBHOOK = ExporterEntry("webhook", alert_of, Webhook, at="incident")


def main() -> None:
    """Send the incident on standard input, and append the result to `deliveries.jsonl`."""
    task = json.loads(sys.stdin.buffer.read())
    arrived, tries, result = deliver(task["settings"], task["incident"])
    line = {"incident": task["incident"]["id"], "sink": "webhook", "arrived": arrived, "tries": tries, "said": result}
    append_lines(Path(task["root"]) / DELIVERIES, [line | {"time": time.time()}])


if __name__ == "__main__":
    main()
