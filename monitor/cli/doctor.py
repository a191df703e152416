"""`trainsentry doctor`: shows what this machine offers and whether each part works on it."""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.table import Table

from trainsentry.exporters.short_text import counted
from trainsentry.monitor.cli.console import FOUND, bad_input, err, out
from trainsentry.monitor.doctor.check import Check
from trainsentry.monitor.doctor.examination import UnknownDeviceError, examine, write_report

STYLES: Final = {"OK": "green", "slow": "yellow", "missing": "red", "wrong": "bold red"}


def doctor_command(
    device: Annotated[str, typer.Option(help="auto (torch's accelerator, else the CPU), cpu, cuda, npu, …")] = "auto",
    out_file: Annotated[
        Path | None, typer.Option("--out", help="A file to attach to a bug report: JSON, without secrets.")
    ] = None,
) -> None:
    """Check this machine: versions, devices, kernels, the recorder, bandwidth, and a small training.

    Under torchrun it checks the ranks over the device's own collectives instead of the training. Exit status 1 when
    something is missing or wrong. Example: trainsentry doctor --device npu --out doctor.json
    """
    checks: list[Check] = []
    try:
        with err.status("examining this machine: about half a minute"), _errors_alone():
            for check in examine(device):
                checks.append(check)  # noqa: PERF402 - what was found before an error is of use too
    except UnknownDeviceError as error:
        bad_input(str(error))
    if os.environ.get("RANK", "0") == "0":
        _show(checks)
        _write(out_file, device, checks)
    if any(check.state in {"missing", "wrong"} for check in checks):
        raise typer.Exit(FOUND)


@contextlib.contextmanager
def _errors_alone() -> Iterator[None]:
    """Leave out what the trainings of the checks say: their incident is made on purpose."""
    logger = logging.getLogger("trainsentry")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _show(checks: list[Check]) -> None:
    table = Table("check", "state", "found", "what to do", show_edge=False, pad_edge=False)
    for check in checks:
        table.add_row(check.name, f"{check.state}", check.found, check.advice, style=STYLES[check.state])
    out.print(table)
    trouble = [check for check in checks if check.state != "OK"]
    out.print(f"{counted(len(trouble), 'check')} of {len(checks)} not OK" if trouble else "everything is OK")


def _write(path: Path | None, device: str, checks: list[Check]) -> None:
    if path is None:
        return
    try:
        write_report(path, device, checks)
    except OSError as error:
        bad_input(f"--out: {path}: {error.strerror}")
    err.print(f"written to {path}; it holds versions, switches and this table", soft_wrap=True)
