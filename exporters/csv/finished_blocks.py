"""Compresses a finished CSV block into Parquet, or CSV under zstd, with the same rows.

A separate process does it, so no writer waits. The CSV is deleted only once the new file is complete, so a kill loses
nothing; readers accept either form.
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
"""zstd level: a third of the size, faster than one run writes."""


def start_compacting(paths: Sequence[Path], form: str) -> None:
    """Start a process that converts finished blocks to `form` in turn; if it cannot start, the CSV stays."""
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
    """Replace a CSV block by a file in `form` (`parquet` or `zstd`); return the new file.

    Raises:
        ValueError: when a line cannot be read; the CSV then stays.

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
        raise ValueError(f"{path}: is not a trainsentry table")
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
    """Compact the blocks named on the command line: FORM PATH…."""
    if hasattr(os, "nice"):
        os.nice(15)
    for path in sys.argv[2:]:
        with contextlib.suppress(ValueError, OSError):  # this block stays; go on with the others
            compact(Path(path), sys.argv[1])


if __name__ == "__main__":
    main()
