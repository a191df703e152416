"""`trainsentry demo --ranks N`: the demo on several ranks of this machine."""

import importlib.util
import threading
import time
from pathlib import Path
from typing import Any, Final

import typer
from rich.text import Text

from trainsentry.anomaly.incident import Incident
from trainsentry.exporters.files.foreign_files import read_lines
from trainsentry.monitor.cli.console import FOUND, ProblemPrinter, bad_input, out
from trainsentry.monitor.cli.demo_show import panel, progress_bar, show_files
from trainsentry.monitor.demo.ranks import DemoTask, lines_of, start_ranks

END_SECONDS: Final = 600.0
"""How long a rank may take to end after the first has trained: busy cores stretch it, and only a hang reaches this."""

STRATEGY_TEXTS = {
    "ddp": "DistributedDataParallel: every rank holds everything",
    "fsdp2": "fully_shard: every rank holds a shard of each parameter",
    "zero3": "DeepSpeed ZeRO stage 3: everything is partitioned",
}


def demo_on_ranks(task: DemoTask, ranks: int, directory: Path) -> None:
    """Run the demo on several ranks and show what was found."""
    if task.strategy == "zero3" and importlib.util.find_spec("deepspeed") is None:
        bad_input("--strategy zero3 needs DeepSpeed: pip install 'trainsentry[deepspeed]'")
    how = f": a byte-level GPT on {ranks} ranks, {STRATEGY_TEXTS[task.strategy]}"
    out.print(Text.assemble(("trainsentry demo", "bold"), how))
    started = time.monotonic()
    processes = start_ranks(task, ranks)
    said: list[dict[str, Any]] = []
    logs: dict[int, str] = {}

    def listen(rank: int) -> None:
        said.extend(lines_of(processes[rank]))

    def drain(rank: int) -> None:
        logs[rank] = (processes[rank].stderr or open("/dev/null")).read()  # noqa: SIM115, PTH123

    threads = [threading.Thread(target=listen, args=(rank,)) for rank in range(1, ranks)]
    threads += [threading.Thread(target=drain, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    try:
        with progress_bar() as bar:
            shown = bar.add_task("training", total=task.steps, loss=float("nan"))
            for line in lines_of(processes[0]):
                said.append(line)
                if "step" in line and "loss" in line:
                    bar.update(shown, completed=line["step"] + 1, loss=line["loss"])
        for process in processes:
            process.wait(timeout=END_SECONDS)
    finally:
        for process in processes:
            process.kill()
        for thread in threads:
            thread.join()
    failed = [rank for rank, process in enumerate(processes) if process.returncode]
    if failed:
        bad_input(f"rank {failed[0]} ended with status {processes[failed[0]].returncode}:\n{logs[failed[0]][-2000:]}")
    out.print(f"{ranks} ranks trained for {time.monotonic() - started:.0f} s")
    found = _show(said, directory)
    show_files(directory)
    if not found:
        raise typer.Exit(FOUND)


def _show(said: list[dict[str, Any]], directory: Path) -> bool:
    """Show incidents and verdict; return whether the first suspect is what broke, or nothing was found of nothing."""
    incidents = _incidents(directory / "incidents.jsonl")
    for incident in incidents:
        out.print(panel(incident))
    stops = {line["stopped"] for line in said if "stopped" in line}
    if stops:
        count = sum("stopped" in line for line in said)
        out.print(f"Stopped on {count} ranks, at step {', '.join(map(str, sorted(stops)))}.")
    flips = [line["flip"] for line in said if "flip" in line]
    if not flips:
        quiet = "No fault was made, and nothing was reported."
        out.print("No fault." if incidents else quiet, style="red" if incidents else "green")
        return not incidents
    flip = flips[0]
    before_it = f"What the monitor did not know: before step {flip['step']}, bit {flip['bit']} of element "
    behind_it = f" flipped ({flip['before']:.4g} became {flip['after']:.4g})."
    where = (f"rank {flip['rank']}", "bold"), " holds of ", (str(flip["parameter"]), "bold")
    out.print(Text.assemble(f"{before_it}{flip['element']} of what ", *where, behind_it))
    first = incidents[0] if incidents else None
    found = first is not None and (first.rank, first.name) == (flip["rank"], flip["parameter"])
    if found:
        out.print("The first suspect is that rank and that parameter.", style="bold green")
    else:
        named = f"{first.name} on rank {first.rank}" if first is not None else "nothing"
        out.print(f"The first suspect was {named}.", style="red")
    return found


def _incidents(path: Path) -> list[Incident]:
    """Return the incidents of a run, the newest line of each."""
    if not path.is_file():
        return []
    newest = {line.get("id"): line for _, line in read_lines(path, ProblemPrinter())}
    return [Incident.from_json(line) for line in newest.values()]
