"""`trainsentry demo --ranks N`: runs the demo on several ranks of this machine."""

import importlib.util
import threading
import time
from pathlib import Path
from typing import Any, Final

import typer
from rich.text import Text

from trainsentry.anomaly.incident import Incident
from trainsentry.exporters.files.foreign_files import read_lines
from trainsentry.exporters.report.page import write_report
from trainsentry.exporters.short_text import counted
from trainsentry.monitor.cli.console import FOUND, ProblemPrinter, bad_input, out
from trainsentry.monitor.cli.demo.show import panel, progress_bar, show_files
from trainsentry.monitor.demo.ranks import DemoTask, messages_of, start_ranks

END_SECONDS: Final = 600.0
"""Seconds that a rank may take to end after rank 0 has trained; even on busy cores only a hang takes so long."""

STRATEGY_TEXTS = {
    "ddp": "DistributedDataParallel: every rank holds all parameters",
    "fsdp2": "fully_shard: every rank holds a shard of each parameter",
    "zero3": "DeepSpeed ZeRO stage 3: parameters, gradients and state are partitioned",
}


def demo_on_ranks(task: DemoTask, ranks: int, directory: Path) -> None:
    """Run the demo on several ranks and show the result."""
    if task.strategy == "zero3" and importlib.util.find_spec("deepspeed") is None:
        bad_input("--strategy zero3 needs DeepSpeed: pip install 'trainsentry[deepspeed]'")
    where = "ranks" if task.device == "cpu" else f"ranks on {task.device}"
    setup = f": a byte-level GPT on {ranks} {where}, {STRATEGY_TEXTS[task.strategy]}"
    out.print(Text.assemble(("trainsentry demo", "bold"), setup))
    started = time.monotonic()
    processes = start_ranks(task, ranks)
    messages: list[dict[str, Any]] = []
    logs: dict[int, str] = {}

    def listen(rank: int) -> None:
        messages.extend(messages_of(processes[rank]))

    def drain(rank: int) -> None:
        logs[rank] = (processes[rank].stderr or open("/dev/null")).read()  # noqa: SIM115, PTH123

    threads = [threading.Thread(target=listen, args=(rank,)) for rank in range(1, ranks)]
    threads += [threading.Thread(target=drain, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    try:
        with progress_bar() as bar:
            shown = bar.add_task("training", total=task.steps, loss="")
            for message in messages_of(processes[0]):
                messages.append(message)
                if "step" in message and "loss" in message:
                    bar.update(shown, completed=message["step"] + 1, loss=f"loss {message['loss']:.3f}")
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
    found = _show(messages, directory)
    show_files(directory)
    if not found:
        raise typer.Exit(FOUND)


def _show(messages: list[dict[str, Any]], directory: Path) -> bool:
    """Show incidents and verdict, and write the report; return whether the verdict is the right one."""
    incidents = _incidents(directory / "incidents.jsonl")
    for incident in incidents:
        out.print(panel(incident))
    if incidents:
        write_report(directory)
    stops = [message["stopped"] for message in messages if "stopped" in message]
    if stops:
        steps = ", ".join(map(str, sorted(set(stops))))
        out.print(f"Stopped on {counted(len(stops), 'rank')}, at step {steps}.")
    flips = [message["flip"] for message in messages if "flip" in message]
    if not flips:
        verdict = "but the monitor reported an incident." if incidents else "and the monitor reported nothing."
        out.print(f"The demo made no fault, {verdict}", style="red" if incidents else "green")
        return not incidents
    flip = flips[0]
    fault = f"The fault, unknown to the monitor: before step {flip['step']}, the demo flipped bit {flip['bit']} of "
    effect = f" ({flip['before']:.4g} became {flip['after']:.4g})."
    where = ("the part of ", (str(flip["parameter"]), "bold"), " on ", (f"rank {flip['rank']}", "bold"))
    out.print(Text.assemble(f"{fault}element {flip['element']} of ", *where, effect))
    first = incidents[0] if incidents else None
    found = first is not None and (first.rank, first.name) == (flip["rank"], flip["parameter"])
    if found:
        out.print("The first suspect is this parameter on this rank.", style="bold green")
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
