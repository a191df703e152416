"""Turns a finished CSV block into a smaller file of the same rows: Parquet, or CSV under zstd.

It is done by a process of its own, so that no writer waits for it. The CSV goes only when the new file is whole, so a
kill in between costs nothing; readers take either.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

SUFFIXES: Final = {"parquet": ".parquet", "zstd": ".csv.zst"}
LEVEL: Final = 6
"""zstd's level: a third of the size at a speed above what one run writes."""


def start_compacting(paths: Sequence[Path], form: str) -> None:
    """Start turning finished blocks into `form`, one after the other; nothing is lost where that cannot be started."""
    with contextlib.suppress(OSError):
        subprocess.Popen(
            [sys.executable, "-m", __name__, form, *map(str, paths)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


def compact(path: Path, form: str) -> Path:
    """Turn a block of CSV into `form` (`parquet` or `zstd`); return the new file, in whose place the old was.

    Raises:
        ValueError: when a line of it cannot be read: then it stays as it is.

    """
    target = path.with_name(path.name.removesuffix(".csv") + SUFFIXES[form])
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        if form == "parquet":
            _to_parquet(path, temporary)
        else:
            _to_zstd(path, temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    path.unlink()
    return target


def _to_zstd(path: Path, target: Path) -> None:
    import zstandard

    with path.open("rb") as source, target.open("wb") as out:
        zstandard.ZstdCompressor(LEVEL, threads=0).copy_stream(source, out)


def _to_parquet(path: Path, target: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from trainsentry.exporters.csv.chunks import frames_of
    from trainsentry.exporters.csv.format import parse_file_name

    file = parse_file_name(path)
    if file is None:
        raise ValueError(f"{path}: no table of ours")
    writer: Any = None
    try:
        for frame in frames_of(file):
            table = pa.Table.from_pandas(frame, preserve_index=False)
            if writer is None:
                writer = pq.ParquetWriter(target, table.schema, compression="zstd", compression_level=LEVEL)
            writer.write_table(table.cast(writer.schema))
    finally:
        if writer is not None:
            writer.close()
    if writer is None:
        raise ValueError(f"{path}: has no rows")


def main() -> None:
    """Turn the blocks that are given into the form that is given."""
    if hasattr(os, "nice"):
        os.nice(15)
    for path in sys.argv[2:]:
        with contextlib.suppress(ValueError, OSError):  # it stays as it is, and the others are still to be done
            compact(Path(path), sys.argv[1])


if __name__ == "__main__":
    main()
