"""The TensorBoard exporter: its settings, and its writer for one place."""

from dataclasses import asdict, dataclass, field

from trainsentry.exporters.exporter import Exporter, ExporterEntry, ExportPlace


@dataclass(frozen=True)
class TensorBoard:
    """Curves and pages, live.

    Of every quantity there are numbers over all layers and a picture of layers over steps, renewed every `renew_every`
    steps, in a long run less often. The statistics of single series whose names match `raw` are written too, unless
    that makes more than `max_raw_tags` (-1: any number).
    """

    raw: list[str] = field(default_factory=lambda: ["*"])
    max_raw_tags: int = field(default=5000, metadata={"ge": -1})
    renew_every: int = field(default=100, metadata={"ge": 1})


def tensorboard_writer(block: TensorBoard, place: ExportPlace) -> Exporter:
    """Return the writer of the run `tensorboard/rank<r>` or `tensorboard/global`."""
    from trainsentry.exporters.tensorboard.writer import TensorBoardWriter  # imports tensorboard: half a second

    events = place.output_dir / "tensorboard" / place.directory.name
    return TensorBoardWriter(events, place.table, place.statistics, lost=place.lost, **asdict(block))


TENSORBOARD = ExporterEntry("tensorboard", tensorboard_writer, TensorBoard)
