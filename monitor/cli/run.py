"""`trainsentry run`: watches an unchanged training script."""

from pathlib import Path
from typing import Annotated

import typer

from trainsentry.monitor.cli.console import bad_input
from trainsentry.monitor.config.files import load_config
from trainsentry.monitor.errors import ConfigError
from trainsentry.monitor.script.running import Program


class StartProgram(BaseException):
    """Carries the program out of the command line's own handling, so that its exits and signals stay its own."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.target)
        self.program = program


def run_command(
    context: typer.Context,
    program: Annotated[
        list[str], typer.Argument(metavar="SCRIPT [ARGS]…", help="The script with its arguments; with -m, a module.")
    ],
    config: Annotated[Path | None, typer.Option(help="The monitor's configuration.")] = None,
    module: Annotated[bool, typer.Option("-m", help="Run a module, as python -m does.")] = False,
    dry: Annotated[bool, typer.Option("--dry", help="Say what would be watched, then end.")] = False,
) -> None:
    """Watch an unchanged training script: its models are found when an optimizer first steps.

    Exit status and signals are the script's own. Under a launcher: torchrun --nproc-per-node 8 --no-python trainsentry
    run train.py, or deepspeed --no_python trainsentry run train.py.
    Example: trainsentry run --config monitor.yaml train.py --lr 1e-4
    """
    from trainsentry.monitor.script.unchanged_script import UnchangedScript

    local_rank = (context.obj or {}).get("local_rank")
    given = () if local_rank is None else (f"--local_rank={local_rank}",)
    wanted = Program(program[0], (*given, *program[1:]), module)
    problem = wanted.problem()
    if problem is not None:
        bad_input(problem)
    try:
        script = UnchangedScript(load_config(config), dry=dry)
    except ConfigError as error:
        bad_input(str(error))
    script.begin()
    raise StartProgram(wanted)
