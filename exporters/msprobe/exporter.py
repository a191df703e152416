"""The exporter of msprobe's monitor files: its settings, and its writer for one rank."""

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Final, Literal

from trainsentry.collectors.record import StepRecord
from trainsentry.exporters.convert.msprobe_tables import directories_of_rank, time_name
from trainsentry.exporters.exporter import ExporterEntry, ExportPlace, setting
from trainsentry.exporters.msprobe.alerts import MsprobeAlerts
from trainsentry.exporters.msprobe.rows import OPS, MsprobeRows, RowChoice
from trainsentry.exporters.msprobe.tables import MsprobeCurves, MsprobeTables

_CLOCK: Final = timezone(timedelta(hours=8))
"""msprobe names directories by the clock of Shanghai, wherever it runs."""


@dataclass(frozen=True)
class MsprobeFiles:
    """The files of msprobe's monitor, for scripts that read them; `trainsentry.TrainerMon` switches them on."""

    format: Literal["csv", "tensorboard"] = setting("csv", "Tables, or one event file.")
    ops: list[str] = setting(  # noqa: RUF009 - a dataclass field, whose list is made for each block
        ["norm", *OPS[7:]], f"Columns. Allowed: {', '.join(OPS)}."
    )
    ndigits: int = setting(6, "Decimal places.", ge=0, le=20)
    steps_per_file: int = setting(1, "Steps in one table.", unit="steps", ge=1, le=1_000_000)
    squash_name: bool = setting(False, "Shorten names: from `layers.`, `embedding`, `final`, `output` or `norm` on.")
    activations: list[str] = setting(  # noqa: RUF009
        ["*"], "Shell-style patterns over `<chunk>:<module>.input` and `….output` (`_<i>` where there are several)."
    )
    parameters: list[str] = setting(["*"], "Shell-style patterns over `<chunk>:<parameter>`.")  # noqa: RUF009
    micro_step_grads: bool = setting(False, "Every micro-step of gradients before reduction, not only the last.")
    communication_inputs: bool = setting(False, "Also what collectives get, not only what they give.")
    append_output: list[str] = setting(  # noqa: RUF009
        [], 'Two times such as "Dec03_21-34-40": go on in the newest directory between them.', max_length=2
    )
    turbulence: float | None = setting(None, "Threshold of `AnomalyTurbulence` in `anomaly.json`.", ge=0)
    not_a_number: bool = setting(False, "`AnomalyNan` in `anomaly.json`: alert at each NaN.")
    largest: float | None = setting(None, "Threshold of `AnomalyNan` for the size of a value.", ge=0)
    framework: Literal["pytorch", "mindspore"] = setting("pytorch", "Whose names of dtypes are written.")


class MsprobeWriter:
    """Writes each record in msprobe's layout, and judges its alerts."""

    def __init__(self, block: MsprobeFiles, place: ExportPlace) -> None:
        chosen = RowChoice(
            tuple(block.activations),
            tuple(block.parameters),
            squash=block.squash_name,
            micro_steps=block.micro_step_grads,
            inputs=block.communication_inputs,
        )
        self._rows = MsprobeRows(place.table, chosen)
        new_directory = _directories(block, place)
        self.restart = place.restart
        self._files: MsprobeTables | MsprobeCurves
        if block.format == "tensorboard":
            self._files = MsprobeCurves(new_directory, block.ops, place.rank)
        else:
            self._files = MsprobeTables(
                new_directory,
                block.ops,
                digits=block.ndigits,
                framework=block.framework,
                steps_per_file=block.steps_per_file,
                micro_steps=block.micro_step_grads,
                lost=place.lost,
            )
        rules = block.turbulence is not None or block.not_a_number
        self._alerts = (
            MsprobeAlerts(
                place.output_dir,
                place.rank,
                block.ops,
                turbulence=block.turbulence,
                nan=block.not_a_number,
                size=block.largest,
            )
            if rules
            else None
        )

    def write(self, record: StepRecord) -> None:
        """Append the record's rows.

        Raises:
            OSError: when a file cannot be written; then no file holds any row of the record.

        """
        rows = self._rows.of(record)
        if rows:
            self._files.write_rows(record.step, record.time, rows)
        if self._alerts is not None:
            self._alerts.judge(record.step, rows)

    def roll_back(self, step: int) -> None:
        """Continue from an earlier step in a new directory."""
        self._files.roll_back(step)

    def close(self) -> None:
        """Close the files, and write the last alerts."""
        self._files.close()
        if self._alerts is not None:
            self._alerts.write()


def _directories(block: MsprobeFiles, place: ExportPlace) -> Callable[[], Path]:
    """Return a function that names a directory: first an existing one to go on in, if configured, then new ones."""
    old: list[Path] = []
    if len(block.append_output) == 2:
        old = directories_of_rank(place.output_dir, place.rank, *block.append_output)[-1:]

    def directory() -> Path:
        if old:
            return old.pop()
        name = f"{time_name(datetime.now(_CLOCK))}-rank{place.rank}-{uuid.uuid4().hex[:8]}"
        return place.output_dir / name

    return directory


MSPROBE = ExporterEntry("msprobe", MsprobeWriter, MsprobeFiles, places=("rank",))
