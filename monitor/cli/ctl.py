"""`trainsentry ctl`: changes what a running job collects, has it dump, or stops it."""

import time
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from trainsentry.exporters.files.foreign_files import InputError, read_object
from trainsentry.exporters.run_reader import read_run
from trainsentry.monitor.cli.console import ProblemPrinter, bad_input, out
from trainsentry.monitor.config.files import parse_config
from trainsentry.monitor.config.schema import MonitorConfig
from trainsentry.monitor.control.changes import parse_settings, with_settings
from trainsentry.monitor.control.control_file import NAME, send
from trainsentry.monitor.errors import ConfigError

STOPPED: Final = "trainsentry ctl stop"
"""The reason that a job reports when no other is given."""


def ctl_command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The job's output directory.")],
    action: Annotated[str, typer.Argument(metavar="set|dump|stop", help="What to do.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE…|now]", help="set: such as collect.activations.every=1.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--for", min=1, help="set: steps after which the earlier values hold again.")
    ] = None,
    reason: Annotated[str, typer.Option(help="stop: the reason that the job reports.")] = STOPPED,
) -> None:
    """Change what a running job collects, how often, its thresholds and exporters; have it dump, or stop it.

    All ranks follow at the same step boundary. Only the user of the job can do this.
    Examples: trainsentry ctl monitor_output set collect.activations.every=1 --for 100; trainsentry ctl monitor_output
    dump now; trainsentry ctl monitor_output stop
    """
    given = arguments or []
    config = _running(directory)
    if action == "set":
        command = _set(config, given, steps)
    elif action == "dump" and given in ([], ["now"]):
        if config.on_incident is None or config.on_incident.dump is None:
            bad_input("dump: on_incident.dump is off in this job")
        command = {"dump": "now"}
    elif action == "stop" and not given:
        command = {"stop": reason}
    else:
        bad_input(f"{' '.join([action, *given])}: allowed: set KEY=VALUE…, dump now, stop")
    try:
        send(directory / NAME, {**command, "time": time.time()})
    except OSError as error:
        bad_input(str(error))
    out.print("sent; the job follows at a step boundary within about two seconds, its log and sampling.jsonl say so")


def _set(config: MonitorConfig, given: list[str], steps: int | None) -> dict[str, Any]:
    """Return the command for keys and values; end with status 2 where one is not allowed."""
    try:
        values = parse_settings(given)
        with_settings(config, values)
    except ConfigError as error:
        bad_input(str(error))
    if not values:
        bad_input("set: nothing to set; allowed: KEY=VALUE, such as collect.activations.every=1")
    return {"set": values} if steps is None else {"set": values, "for": steps}


def _running(directory: Path) -> MonitorConfig:
    """Return the configuration of the job that writes to a directory; end with status 2 where none runs."""
    try:
        config = parse_config(read_object(directory / "run.json")["configuration"], str(directory / "run.json"))
        run = read_run(directory, ProblemPrinter())
    except (OSError, InputError, ConfigError, KeyError) as error:
        bad_input(f"{directory}: no job writes here: {error}")
    if run.is_over:
        bad_input(f"{directory}: the job has ended")
    return config
