"""An exporter from outside the package: one line of JSON per step with the largest norm of its rows."""

import json
from dataclasses import dataclass

from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.statistics import NORM
from trainsentry.exporters.exporter import ExporterEntry, ExportPlace, Needed, setting


@dataclass(frozen=True)
class Toy:
    """The largest norm of every `every`-th step, in `<file>.jsonl` beside the tables."""

    file: str = setting("toy", "Name of the file, without its suffix.", min_length=1)
    every: int = setting(1, "Distance between two lines.", unit="steps", ge=1)


class ToyWriter:
    """Appends a line per step."""

    def __init__(self, block: Toy, place: ExportPlace) -> None:
        place.directory.mkdir(parents=True, exist_ok=True)
        self._every = block.every
        self._file = (place.directory / f"{block.file}.jsonl").open("a", buffering=1)

    def write(self, record: StepRecord) -> None:
        """Write the record's line."""
        if record.step % self._every == 0:
            self._file.write(json.dumps({"step": record.step, "norm": float(record.values[:, NORM].max())}) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


TOY = ExporterEntry("toy", ToyWriter, Toy, places=("rank",))


def fail_to_make(*_):
    """Stand for an exporter with a fault in its constructor."""
    raise RuntimeError("this toy is broken")


BROKEN = ExporterEntry("broken", fail_to_make, Toy)


@dataclass(frozen=True)
class Demanding:
    """A block with a field that has no default."""

    file: str


DEMANDING = ExporterEntry("demanding", ToyWriter, Demanding)
LACKING = ExporterEntry("lacking", ToyWriter, Toy, needs=(Needed("no_such_package", "pip install no-such-package"),))
TAKEN = ExporterEntry("csv", ToyWriter, Toy)
SETTING = ExporterEntry("max_wait", ToyWriter, Toy)
NO_DATACLASS = ExporterEntry("no_dataclass", ToyWriter, dict)
