"""The CSV exporter: its settings, and its writer for one place."""

from dataclasses import dataclass
from typing import Literal

from trainsentry.exporters.csv.writer import CsvWriter
from trainsentry.exporters.exporter import ExporterEntry, ExportPlace, Needed, setting


@dataclass(frozen=True)
class Csv:
    """CSV tables, one for each quantity and block of steps."""

    steps_per_file: int = setting(1000, "Steps in one table.", unit="steps", ge=1)
    finished_blocks: Literal["csv", "zstd", "parquet"] = setting(
        "csv", "Format of a table once the next one begins. A process of its own converts it; nothing waits."
    )
    levels: bool = setting(
        True, "Whether thinned copies of the tables are kept, by which a long history opens in seconds."
    )


def csv_writer(block: Csv, place: ExportPlace) -> CsvWriter:
    """Return the writer of a directory's tables."""
    return CsvWriter(
        place.directory,
        place.table,
        place.statistics,
        steps_per_file=block.steps_per_file,
        finished_blocks=block.finished_blocks,
        levels=block.levels,
        start_step=place.start_step,
        restart=place.restart,
        histograms=place.histograms,
        lost=place.lost,
    )


CSV = ExporterEntry(
    "csv",
    csv_writer,
    Csv,
    on=True,
    needs=(
        Needed(
            "pyarrow",
            "'parquet' needs pyarrow; allowed: pip install 'trainsentry[parquet]'",
            setting="finished_blocks",
            value="parquet",
        ),
        Needed(
            "zstandard",
            "'zstd' needs zstandard; allowed: pip install 'trainsentry[zstd]'",
            setting="finished_blocks",
            value="zstd",
        ),
    ),
)
