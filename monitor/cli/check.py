"""`trainsentry check`, and msprobe's spellings of it: `run_ut` and `multi_run_ut`."""

import argparse
import json
import os
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from trainsentry.exporters.files.foreign_files import MAX_SETTINGS_BYTES, InputError, parse_json, read_bytes
from trainsentry.exporters.short_text import counted, shorten
from trainsentry.monitor.accuracy.check_page import write_page
from trainsentry.monitor.accuracy.check_run import MSPROBE, SEED, CheckOptions, CheckSummary, run_check
from trainsentry.monitor.accuracy.dumped_calls import DATA
from trainsentry.monitor.accuracy.judged_call import RULES
from trainsentry.monitor.cli.console import FOUND, MAX_MESSAGE, bad_input, err, out

MOST_PROCESSES: Final = 64
"""Processes at most, as of msprobe's multi_run_ut."""

USUAL_PROCESSES: Final = 4
"""Processes unless said otherwise, where there are as many processors: each holds a copy of torch."""

SHOWN_CALLS: Final = 20
"""Calls that the summary lists of each kind; the tables have all."""

INTERRUPTED: Final = 130
"""Exit status after Ctrl-C, as of shells."""


def check_command(
    dump: Annotated[Path, typer.Argument(help="A dump.json, or the folder of one rank and step.")],
    out_path: Annotated[Path, typer.Option("--out", "-o", help="Folder for the two tables.")] = Path(),
    data: Annotated[
        str, typer.Option(help="real (dumped tensors), random (seeded, of the recorded range), auto.")
    ] = "auto",
    rule: Annotated[str, typer.Option(help="What decides: standards, run_ut or mindspore.")] = "standards",
    save_errors: Annotated[bool, typer.Option("--save-errors", help="Save the tensors of failed calls.")] = False,
    resume: Annotated[Path | None, typer.Option(help="Result table of an interrupted check.")] = None,
    processes: Annotated[
        int | None, typer.Option(min=0, max=MOST_PROCESSES, help="Processes; 0: in this one, which a fault ends.")
    ] = None,
    devices: Annotated[str, typer.Option(help="Devices under test: cpu, or 0,1 of the accelerator, or cuda:1.")] = "0",
    only: Annotated[list[str] | None, typer.Option(help="Check only this operation or call; repeatable.")] = None,
    without: Annotated[list[str] | None, typer.Option(help="Leave out this operation or call; repeatable.")] = None,
    filter_calls: Annotated[bool, typer.Option("--filter", help="Leave out calls that differ in values only.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of random tensors.")] = SEED,
    html: Annotated[Path | None, typer.Option(help="Also write the outcome as one HTML page.")] = None,
) -> None:
    """Run every call of a dump again, on the device and in a better precision, and compare.

    Exit status 1 when a call fails or cannot be checked. Example: trainsentry check dump/step0/rank0 -o checked
    """
    for key, value, allowed in (("--data", data, DATA), ("--rule", rule, RULES)):
        if value not in allowed:
            bad_input(f"{key}: {value!r}; allowed: {', '.join(allowed)}")
    options = CheckOptions(
        dump=dump,
        out=out_path,
        data=data,
        seed=seed,
        rule=rule,
        save_errors=save_errors,
        resume=resume,
        processes=min(USUAL_PROCESSES, os.cpu_count() or 1) if processes is None else processes,
        devices=[name for name in devices.split(",") if name] or ["0"],
        only=only or [],
        without=without or [],
        differing=filter_calls,
    )
    _check(options, html)


def run_ut_command(context: typer.Context) -> None:
    """Check a dump with the options of msprobe's run_ut and the pass rule of its tool for the framework."""
    _check(_run_ut_options(_run_ut_parser("run_ut").parse_args(context.args), processes=1))


def multi_run_ut_command(context: typer.Context) -> None:
    """Check a dump in several processes, with the options of msprobe's multi_run_ut and its pass rule."""
    parser = _run_ut_parser("multi_run_ut")
    parser.add_argument("-n", "--num_splits", type=int, default=8, choices=range(1, MOST_PROCESSES + 1), metavar="N")
    given = parser.parse_args(context.args)
    _check(_run_ut_options(given, processes=given.num_splits))


def _run_ut_parser(name: str) -> argparse.ArgumentParser:
    """Return a parser of msprobe's options; `-j` concerns its compiler for NPUs and has no effect."""
    parser = argparse.ArgumentParser(f"trainsentry {name}", description="msprobe's options; see trainsentry check.")
    parser.add_argument("-api_info", "--api_info_file", type=Path, required=True, help="a dump.json")
    parser.add_argument("-o", "--out_path", type=Path, default=Path(), help="folder for the two tables")
    parser.add_argument("-save_error_data", action="store_true", help="save the tensors of failed calls")
    parser.add_argument("-j", "--jit_compile", action="store_true", help="accepted, without effect")
    parser.add_argument("-d", "--device", nargs="+", type=int, default=[0], help="numbers of devices")
    parser.add_argument("-csv_path", "--result_csv_path", type=Path, help="result table of an interrupted check")
    parser.add_argument("-f", "--filter_api", action="store_true", help="leave out calls that differ in values only")
    parser.add_argument("-config", "--config_path", type=Path, help="white_list, black_list, error_data_path")
    return parser


def _run_ut_options(given: argparse.Namespace, processes: int) -> CheckOptions:
    lists = _lists(given.config_path) if given.config_path else {}
    path = lists.get("error_data_path")
    return CheckOptions(
        dump=given.api_info_file,
        out=given.out_path,
        rule=MSPROBE,
        save_errors=given.save_error_data,
        errors_in=Path(path) if isinstance(path, str) else Path(),
        resume=given.result_csv_path,
        processes=processes,
        devices=[str(number) for number in given.device],
        only=_names(lists, "white_list"),
        without=_names(lists, "black_list"),
        differing=given.filter_api,
    )


def _lists(path: Path) -> dict[str, Any]:
    """Return the member run_ut (26.x: acc_check) of msprobe's configuration."""
    try:
        content = parse_json(read_bytes(path, MAX_SETTINGS_BYTES))
    except InputError as error:
        bad_input(f"{path}: {str(error).removeprefix(f'{path}: ')}")
    except OSError as error:
        bad_input(f"{path}: {error.strerror}")
    found = content.get("run_ut", content.get("acc_check")) if isinstance(content, dict) else None
    return found if isinstance(found, dict) else {}


def _names(lists: dict[str, Any], key: str) -> list[str]:
    value = lists.get(key, [])
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        bad_input(f"{key}: {json.dumps(value)}; allowed: a list of names such as conv2d")
    return value


def _check(options: CheckOptions, html: Path | None = None) -> None:
    """Run a check, show its summary, write its page, and end with its exit status."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
            task = bar.add_task("checking", total=None)

            def show(done: int, total: int, call: str) -> None:
                bar.update(task, completed=done, total=total, description=shorten(call, 40))

            summary = run_check(options, show)
    except KeyboardInterrupt:
        err.print("interrupted; --resume (-csv_path) with the result table continues", soft_wrap=True)
        raise typer.Exit(INTERRUPTED) from None
    except InputError as error:
        bad_input(str(error))
    except OSError as error:
        bad_input(f"{error.filename or options.out}: {error.strerror}")
    _show(summary)
    if html is not None:
        _write_page(html, summary, options)
    if not summary.is_clean:
        raise typer.Exit(FOUND)


def _write_page(path: Path, summary: CheckSummary, options: CheckOptions) -> None:
    try:
        write_page(path, summary, options)
    except OSError as error:
        bad_input(f"--html: {path}: {error.strerror}")
    out.print(f"page: {path}", soft_wrap=True)


def _show(summary: CheckSummary) -> None:
    for text in summary.damaged:
        _line(err, "damaged", text, "yellow")
    for call in summary.unusable[:MAX_MESSAGE]:
        _line(err, call.call, call.message, "yellow")
    if summary.torn:
        _line(err, "dump.json", "is truncated: only the calls before the break were checked", "yellow")
    failures = summary.failures
    for call in failures[:SHOWN_CALLS]:
        _line(out, f"{call.status}: {call.call}", call.message, "bold")
    if len(failures) > SHOWN_CALLS:
        out.print(f"and {len(failures) - SHOWN_CALLS} more that failed", soft_wrap=True)
    for reason, count in _reasons(summary).items():
        out.print(f"{counted(count, 'call')} {reason}", soft_wrap=True)
    out.print(summary.sentence, soft_wrap=True)
    out.print(f"tables: {summary.result}", soft_wrap=True)


def _line(console: Any, head: str, text: str, style: str) -> None:
    console.print(Text.assemble((head, style), f": {shorten(text, MAX_MESSAGE)}"), soft_wrap=True)


def _reasons(summary: CheckSummary) -> dict[str, int]:
    """Return how many calls were not compared, by reason, the commonest first."""
    found: dict[str, int] = {}
    for call in summary.skipped:
        found[call.message] = found.get(call.message, 0) + 1
    return dict(sorted(found.items(), key=lambda item: -item[1])[:SHOWN_CALLS])
