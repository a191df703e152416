"""Offers msprobe's conversion function with the same arguments, tags and directories."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Final

from trainsentry.exporters.convert.conversion_state import Choice, Table
from trainsentry.exporters.convert.csv2tb import Conversion, convert
from trainsentry.exporters.convert.msprobe_tables import msprobe_tables
from trainsentry.exporters.csv.table_rows import RowKey
from trainsentry.exporters.files.foreign_files import InputError, Report

DATA_TYPES: Final = (
    "actv", "actv_grad", "exp_avg", "exp_avg_sq", "grad_unreduced", "grad_reduced", "param_origin", "param_updated",
    "param",
)  # fmt: skip
"""Tables of msprobe's monitor that are converted; `param` is the older release's."""


def csv2tensorboard_by_step(
    monitor_path: str,
    time_start: str | None = None,
    time_end: str | None = None,
    process_num: int = 1,
    data_type_list: Sequence[str] | None = None,
    output_dirpath: str | None = None,
    *,
    report: Report = lambda *_: None,
) -> Conversion:
    """Convert msprobe's monitor output as `msprobe.pytorch.monitor.csv2tb.csv2tensorboard_by_step` does.

    Every value goes to `rank<r>/<type>` with the tag `vp<stage>:<name>[:micro<n>]/<statistic>`. Of a step that occurs
    twice, where msprobe stops, the newest rows are taken.

    Raises:
        InputError: when there is nothing to convert.
        ValueError: for an invalid process number, type or time.

    """
    if isinstance(process_num, bool) or not isinstance(process_num, int) or process_num < 1:
        raise ValueError(f"process_num: {process_num!r}; allowed: a whole number above 0")
    unknown = set(data_type_list or ()) - set(DATA_TYPES)
    if unknown or isinstance(data_type_list, str):
        raise ValueError(f"data_type_list: {data_type_list!r}; allowed: {', '.join(DATA_TYPES)}")
    source = Path(monitor_path)
    out = Path(output_dirpath or source / f"{datetime.now():%b%d_%H-%M-%S}-csv2tensorboard_by_step")
    wanted = data_type_list or DATA_TYPES
    tables = [
        Table(run, name, tuple(files), out / run / name, f".csv2tb.{name}")
        for run, found in msprobe_tables(source, time_start, time_end).items()
        for name, files in found.items()
        if name in wanted
    ]
    if not tables:
        raise InputError(f"{source}: holds no output of msprobe's monitor from that time and of that type")
    return convert(tables, Choice(full=True, flat_zeros=True), _their_tag, report, process_num, lambda *_: None)


def _their_tag(table: str, key: RowKey, column: str) -> str:
    del table
    micro = f":micro{key.micro_step}" if key.micro_step >= 0 else ""
    return f"vp{key.vpp_stage}:{key.name}{micro}/{column}"
