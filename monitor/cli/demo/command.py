"""`trainsentry demo`: trains a small model, breaks one weight, and shows that the monitor finds it."""

import enum
import functools
import importlib.util
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from trainsentry.exporters.report.page import write_report
from trainsentry.exporters.short_text import counted
from trainsentry.monitor.cli.console import FOUND, bad_input, out
from trainsentry.monitor.cli.demo.show import panel, progress_bar, show_files

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainsentry.monitor.demo.outcome import Outcome


class Fault(str, enum.Enum):
    """The fault in a weight midway."""

    FLIP = "flip"
    SOFT = "soft"
    NONE = "none"


class Strategy(str, enum.Enum):
    """How several ranks share the work."""

    DDP = "ddp"
    FSDP2 = "fsdp2"
    ZERO3 = "zero3"


class Stop(str, enum.Enum):
    """The event that ends the run."""

    INCIDENT = "incident"
    OVERFLOW = "overflow"
    NEVER = "never"


class DemoDevice(str, enum.Enum):
    """The device that trains."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"
    NPU = "npu"


class DemoFramework(str, enum.Enum):
    """The framework of the model."""

    TORCH = "torch"
    MINDSPORE = "mindspore"


def demo_command(
    steps: Annotated[int, typer.Option(min=20, help="Training steps.")] = 150,
    fault: Annotated[
        Fault, typer.Option(help="flip: bit 30 of one weight (×2^128); soft: bit 25 or 26 (×16 or ×256); none.")
    ] = Fault.FLIP,
    fault_parameter: Annotated[
        str | None, typer.Option(help="The parameter to break; chosen by --seed if left out.")
    ] = None,
    stop: Annotated[
        Stop, typer.Option(help="End the run at the incident, after --overflow-nums overflows, or never.")
    ] = Stop.INCIDENT,
    overflow_nums: Annotated[int, typer.Option(min=1, help="Steps with an overflow before the stop.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the model, the data and the fault.")] = 0,
    ranks: Annotated[int, typer.Option(min=1, max=8, help="Processes on this machine; one has the fault.")] = 1,
    strategy: Annotated[Strategy, typer.Option(help="How several ranks share the work.")] = Strategy.DDP,
    device: Annotated[
        DemoDevice,
        typer.Option(help="Where to train. auto: torch's accelerator, else the CPU; several ranks: the CPU."),
    ] = DemoDevice.AUTO,
    framework: Annotated[DemoFramework, typer.Option(help="The framework of the model.")] = DemoFramework.TORCH,
    output_dir: Annotated[Path | None, typer.Option(help="Where to write; a new demo_output by default.")] = None,
) -> None:
    """Train a small GPT on real text, break one weight midway, and find it.

    Example: trainsentry demo --fault-parameter blocks.2.up.weight, or with --ranks 2 --strategy fsdp2
    """
    # The incident is printed below in full; its log line would break the progress bar.
    logging.getLogger("trainsentry").setLevel(logging.ERROR)
    train, where = _training(framework, device, ranks)
    directory = output_dir or _fresh(Path("demo_output"))
    config = _config(directory, stop, overflow_nums)
    if ranks > 1:
        from trainsentry.monitor.cli.demo.ranks import demo_on_ranks
        from trainsentry.monitor.demo.ranks import DemoTask

        broken = seed % ranks if fault is not Fault.NONE else -1
        share = DemoTask(config, strategy.value, steps, seed, fault.value, broken, fault_parameter, where)
        demo_on_ranks(share, ranks, directory)
        return
    setup = ": a byte-level GPT learns Python's language reference" + ("" if where == "cpu" else f" on {where}")
    out.print(Text.assemble(("trainsentry demo", "bold"), setup))
    started = time.monotonic()
    outcome = _train(train, config, steps, seed=seed, fault=fault.value, fault_parameter=fault_parameter)
    _show(outcome, time.monotonic() - started)
    if outcome.incidents:
        write_report(directory)
    show_files(directory)
    if not outcome.found:
        raise typer.Exit(FOUND)


def _training(framework: DemoFramework, device: DemoDevice, ranks: int) -> "tuple[Callable[..., Outcome], str]":
    """Return the training function and where it trains; end the command when framework or device is not there."""
    if framework is DemoFramework.MINDSPORE:
        _check_mindspore(device, ranks)
    if importlib.util.find_spec(framework.value) is None:
        bad_input(f"the demo needs {framework.value}: pip install 'trainsentry[{framework.value}]'")
    if framework is DemoFramework.MINDSPORE:
        from trainsentry.monitor.demo.mindspore_training import train as train_mindspore

        return train_mindspore, "MindSpore"
    import torch

    from trainsentry.monitor.demo.device import training_device
    from trainsentry.monitor.demo.training import train

    try:
        chosen = training_device(device.value, ranks, [each.value for each in DemoDevice])
    except ValueError as error:
        bad_input(str(error))
    torch.set_num_threads(min(2, torch.get_num_threads()))
    return functools.partial(train, device=chosen), chosen.type


def _check_mindspore(device: DemoDevice, ranks: int) -> None:
    """End the command when the demo of MindSpore cannot be run so: it trains where MindSpore itself is set to."""
    if ranks > 1:
        bad_input("--ranks: the MindSpore demo runs on one rank; allowed: 1")
    if device is not DemoDevice.AUTO:
        bad_input(f"--device {device.value}: the MindSpore demo trains where MindSpore is set to; allowed: auto")


def _train(train: "Callable[..., Outcome]", config: dict[str, Any], steps: int, **fault: Any) -> "Outcome":
    """Train behind a progress bar; end the command when the fault cannot be made."""
    with progress_bar() as bar:
        task = bar.add_task("training", total=steps, loss="")

        def progress(step: int, loss: float) -> None:
            bar.update(task, completed=step + 1, loss=f"loss {loss:.3f}")

        try:
            return train(config, steps=steps, progress=progress, **fault)
        except ValueError as error:
            bad_input(str(error))


def _config(directory: Path, stop: Stop, overflow_nums: int) -> dict[str, Any]:
    """Return the monitor's configuration."""
    return {
        "output_dir": str(directory),
        "export": {"tensorboard": True, "report": False},  # the demo writes it before it lists the files
        "overflow_check": {"overflow_nums": overflow_nums if stop is Stop.OVERFLOW else -1},
        # On an accelerator too the fault is found before an update spreads it, for one wait a step.
        "on_incident": {"stop": stop is Stop.INCIDENT, "dump": {"same_step": True}},
    }


def _show(outcome: "Outcome", seconds: float) -> None:
    from trainsentry.monitor.errors import OverflowLimitReached

    before = outcome.losses[: outcome.flip_step]
    out.print(
        f"{counted(outcome.steps, 'step')} in {seconds:.0f} s; loss {before[0]:.2f} → {before[-1]:.2f}"
        + (" before the fault" if outcome.flip else "")
    )
    for incident in outcome.incidents:
        out.print(panel(incident))
    if outcome.stopped is not None:
        kind = "overflow_nums" if isinstance(outcome.stopped, OverflowLimitReached) else "the incident"
        out.print(f"Stopped by {kind} at step {outcome.stopped.step}, before its update.")
    flip = outcome.flip
    if flip is None:
        verdict = "and the monitor reported nothing." if outcome.found else "but the monitor reported an incident."
        out.print(f"The demo made no fault, {verdict}", style="green" if outcome.found else "red")
        return
    fault = f"The fault, unknown to the monitor: before step {outcome.flip_step}, the demo flipped bit {flip.bit} of "
    effect = f" ({flip.before:.4g} became {flip.after:.4g})."
    out.print(Text.assemble(f"{fault}element {flip.element} of ", (flip.parameter, "bold"), effect))
    if outcome.found:
        out.print("The first suspect is the flipped parameter.", style="bold green")
    elif outcome.incidents:
        out.print(f"The first suspect was {outcome.incidents[0].name}, not the flipped parameter.", style="red")
    else:
        out.print("The monitor reported nothing.", style="red")


def _fresh(path: Path) -> Path:
    """Return `path`, or the first of path-2, path-3, … that does not exist yet."""
    number, fresh = 1, path
    while fresh.exists():
        number += 1
        fresh = path.with_name(f"{path.name}-{number}")
    return fresh
