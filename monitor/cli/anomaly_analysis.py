"""msprobe's command that ranks the alerts of its monitor, with its options and its file `anomaly_analyse.json`."""

import json
from pathlib import Path
from typing import Annotated, Final

import typer

from trainsentry.exporters.files.json_files import replace_json
from trainsentry.exporters.msprobe.recorded_alerts import RecordedAlert, alert_files, at_steps, read_alerts
from trainsentry.monitor.cli.console import ProblemPrinter, bad_input, out

RANKED: Final = "anomaly_analyse.json"


def main() -> None:
    """Run `python -m trainsentry.pytorch.monitor.anomaly_analyse`."""
    typer.run(analyse_command)


def analyse_command(
    data_path: Annotated[Path, typer.Option("-d", "--data_path", help="A folder with rank<r>/anomaly.json.")],
    out_path: Annotated[Path | None, typer.Option("-o", "--out_path", help="Where to write; default: there.")] = None,
    top: Annotated[int, typer.Option("-k", "--topk", min=1, help="Alerts shown.")] = 8,
    steps: Annotated[str, typer.Option("-s", "--step", "--step_list", help="Only these steps: [3,4].")] = "[]",
) -> None:
    """Rank the alerts in a folder: the earliest are the likeliest causes."""
    files = alert_files(data_path)
    if not files:
        bad_input(f"{data_path}: holds no rank<r>/anomaly.json")
    try:
        wanted = json.loads(steps)
    except ValueError:
        wanted = None
    if not isinstance(wanted, list) or not all(isinstance(step, int) for step in wanted):
        bad_input(f"--step: {steps!r}; allowed: a list of steps such as [3,4]")
    show_alerts(at_steps(read_alerts(files, ProblemPrinter()), wanted), top, out_path or data_path)


def show_alerts(alerts: list[RecordedAlert], top: int, out_path: Path | None) -> None:
    """Print the first alerts, and write them to `<out_path>/anomaly_analyse.json` where it is not None."""
    for number, alert in enumerate(alerts[:top], 1):
        out.print(f"{number:3}. rank {alert.members['rank']}, step {alert.step}: {alert.members.get('message', '')}")
    if out_path is not None:
        path = out_path / RANKED
        replace_json(path, {alert.key: alert.members for alert in alerts[:top]})
        out.print(f"{min(top, len(alerts))} of {len(alerts)} alerts are in {path}")
