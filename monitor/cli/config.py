"""`trainsentry config check|schema`: validates a configuration, prints the JSON schema."""

import json
from pathlib import Path
from typing import Annotated

import typer

from trainsentry.monitor.cli.console import bad_input, out
from trainsentry.monitor.config.files import load_config
from trainsentry.monitor.config.schema import MonitorConfig
from trainsentry.monitor.errors import ConfigError

config_app = typer.Typer(help="Check a configuration, or print its JSON schema.", no_args_is_help=True)


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


@config_app.command("schema")
def schema_command() -> None:
    """Print the JSON schema of the configuration.

    Example: trainsentry config schema > schema.json
    """
    typer.echo(json.dumps(MonitorConfig.model_json_schema(), indent=2))
