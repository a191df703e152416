"""The TensorBoard exporter: its settings, and its writer for one place."""

from dataclasses import asdict, dataclass

from trainsentry.exporters.exporter import Exporter, ExporterEntry, ExportPlace, setting


@dataclass(frozen=True)
class TensorBoard:
    """Curves and pages in TensorBoard while the run goes on: numbers over all layers, maps, single series."""

    raw: list[str] = setting(  # noqa: RUF009 - a dataclass field, whose list is made for each block
        ["*"], "Shell-style patterns over the names of single series to write."
    )
    max_raw_tags: int = setting(
        5000,
        "Tags of single series at most, besides scalars and suspects; norms come first. -1: any number.",
        unit="tags",
        ge=-1,
    )
    renew_every: int = setting(100, "Distance between maps of a quantity; it grows in a long run.", unit="steps", ge=1)


def tensorboard_writer(block: TensorBoard, place: ExportPlace) -> Exporter:
    """Return the writer of the run `tensorboard/rank<r>` or `tensorboard/global`."""
    from trainsentry.exporters.tensorboard.writer import TensorBoardWriter  # imports tensorboard: half a second

    events = place.output_dir / "tensorboard" / place.directory.name
    return TensorBoardWriter(
        events,
        place.table,
        place.statistics,
        output_dir=place.output_dir,
        lost=place.lost,
        missing=place.missing,
        left_out=place.left_out,
        histograms=place.histograms,
        **asdict(block),
    )


TENSORBOARD = ExporterEntry("tensorboard", tensorboard_writer, TensorBoard)
