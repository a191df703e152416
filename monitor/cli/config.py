"""`trainsentry config check|convert|schema|reference`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from trainsentry.monitor.cli.console import bad_input, err, out
from trainsentry.monitor.config.files import load_config, parse_config, read_file
from trainsentry.monitor.config.reference import render_reference
from trainsentry.monitor.config.schema import MonitorConfig
from trainsentry.monitor.debugger.debugger_config import DebuggerConfig
from trainsentry.monitor.errors import ConfigError
from trainsentry.monitor.msprobe.translation import translate

config_app = typer.Typer(
    help="Check or convert a configuration, or print its JSON schema or its reference.", no_args_is_help=True
)


@config_app.command("check")
def check_command(
    file: Annotated[Path, typer.Argument(help="A .json, .yaml or .toml file.")],
) -> None:
    """Check a configuration, and print it with all defaults.

    Example: trainsentry config check monitor.yaml
    """
    try:
        config = load_config(file)
    except ConfigError as error:
        bad_input(str(error))
    out.print_json(json.dumps(config.model_dump(mode="json")))


@config_app.command("convert")
def convert_command(
    file: Annotated[Path, typer.Argument(help="msprobe's monitor_config.json, of either generation.")],
    to: Annotated[Path | None, typer.Argument(metavar="[OUT]", help="Where to write; default: print it.")] = None,
    keep_files: Annotated[
        bool, typer.Option("--keep-files", help="Write msprobe's files (V1) in place of our tables.")
    ] = False,
) -> None:
    """Convert the configuration of msprobe's monitor into ours, and say what changes.

    Example: trainsentry config convert monitor_config.json monitor.json
    """
    try:
        translation = translate(read_file(file), str(file), files=keep_files)
        parse_config(translation.config, str(file))
    except ConfigError as error:
        bad_input(str(error))
    text = json.dumps(translation.config, indent=2) + "\n"
    if to is None:
        typer.echo(text, nl=False)
    else:
        try:
            to.write_text(text, encoding="utf-8")
        except OSError as error:
            bad_input(f"{to}: cannot be written: {error}")
    for difference in translation.differences:
        err.print(f"changes: {difference}", soft_wrap=True)


@config_app.command("schema")
def schema_command() -> None:
    """Print the JSON schema of the configuration.

    Example: trainsentry config schema > schema.json
    """
    typer.echo(json.dumps(MonitorConfig.model_json_schema(), indent=2))


@config_app.command("reference")
def reference_command(
    debugger: Annotated[bool, typer.Option("--debugger", help="The keys of PrecisionDebugger.")] = False,
) -> None:
    """Print every key with its type, default, unit and meaning, as Markdown.

    Example: trainsentry config reference > docs/configuration.md
    """
    if debugger:
        page = render_reference(
            DebuggerConfig, "The debugger's configuration", "trainsentry config reference --debugger"
        )
    else:
        page = render_reference(MonitorConfig, "The configuration", "trainsentry config reference")
    typer.echo(page, nl=False)
