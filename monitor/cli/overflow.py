"""`trainsentry overflow`: finds the first NaN or Inf in a dump."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from trainsentry.anomaly.dumps.first_overflow import FirstOverflow, first_overflows
from trainsentry.exporters.dumps.dump_reader import RankDump, read_dumps
from trainsentry.exporters.files.foreign_files import InputError
from trainsentry.exporters.short_text import counted
from trainsentry.monitor.cli.console import FOUND, ProblemPrinter, bad_input, out

SHOWN_LINES = 4
"""Lines shown of a call's stack."""


def overflow_command(
    dump: Annotated[Path, typer.Argument(help="A dump of a rank, a step, or many steps.")],
) -> None:
    """Find the first NaN or Inf in a dump of many ranks, and judge whether the call or the device is at fault.

    Exit status 1 when there is one. Example: trainsentry overflow dump/step12
    """
    try:
        dumps = read_dumps(dump, ProblemPrinter())
    except (InputError, OSError) as error:
        bad_input(str(error))
    for step in sorted({d.step for d in dumps}):
        ranks = [d for d in dumps if d.step == step]
        found = first_overflows(ranks)
        if found:
            _show(step, found, {d.rank: d for d in ranks})
            raise typer.Exit(FOUND)
    calls = counted(sum(len(d.calls) for d in dumps), "call")
    out.print(f"{dump}: no NaN and no Inf in the results of {calls}", soft_wrap=True)


def _show(step: int, found: list[FirstOverflow], dumps: dict[int, RankDump]) -> None:
    first = found[0]
    verb = "made" if first.made else "passed on"
    places = ", ".join(first.places)
    where = (f"step {step}: {first.call} on rank {first.rank}", "bold")
    out.print(Text.assemble(where, f" {verb} NaN or Inf ({places})"), soft_wrap=True)
    dump = dumps[first.rank]
    for line in dump.stacks.get(first.call.replace(".backward", ".forward"), [])[:SHOWN_LINES]:
        out.print(f"    {' '.join(line.split())}", soft_wrap=True)
    verdict, why = verdict_on(first, dump)
    out.print(Text.assemble("verdict: ", (verdict, "bold"), f" overflow: {why}"), soft_wrap=True)
    for other in found[1:]:
        plural = "s" * (len(other.from_ranks) != 1)
        source = f", from rank{plural} {', '.join(map(str, other.from_ranks))}" if other.from_ranks else ""
        out.print(f"later: {other.call} on rank {other.rank}{source}", soft_wrap=True)


def verdict_on(overflow: FirstOverflow, dump: RankDump) -> tuple[str, str]:
    """Replay a call on the CPU; return normal, abnormal or unknown, and the reason."""
    if not overflow.made:
        return "unknown", "its inputs already hold NaN or Inf, and the call that made them was not dumped"
    if dump.head.get("framework", "pytorch") != "pytorch":
        return "unknown", f"calls of {dump.head['framework']} are not replayed"
    from trainsentry.collectors.torch.calls.replay_call import replay

    backward = overflow.call.endswith(".backward")
    forward: dict[str, Any] = dump.calls.get(overflow.call.replace(".backward", ".forward"), {})
    if backward and not forward:
        return "unknown", "its forward pass is not in the dump"
    gradients = dump.calls[overflow.call].get("input", []) if backward else None
    if gradients is not None and not isinstance(gradients, list):
        return "unknown", "the gradients in its entry are not a list"
    return replay(overflow.call, forward, gradients, dump.directory / "dump_tensor_data")
