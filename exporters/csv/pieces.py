"""The bytes of a table, plain or under zstd: in pieces of whole lines, within bounds on a line and on what expands."""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from trainsentry.exporters.files.foreign_files import InputError, open_file, skip_line

PIECE_BYTES: Final = 4 << 20
"""Bytes read at a time: enough that pandas' overhead a piece vanishes, little beside its own memory."""

MAX_LINE_BYTES: Final = 1 << 16
"""Bytes of the longest line of a table: a name has some hundred, and forty numbers a thousand."""

MAX_EXPANSION: Final = 1000
"""How many times its size a compressed table may become: tables of one constant become four hundred times."""

MIN_EXPANDED_LIMIT: Final = 1 << 26
"""Bytes that any compressed table may become: one piece after the other, they are read within a second."""


@dataclass(frozen=True, slots=True)
class TablePiece:
    """Bytes of a table that end with a line, or with the file; `data` is None for `size` bytes of one endless line."""

    data: bytes | None
    size: int


def allowed_bytes(path: Path) -> int:
    """Return how many bytes a compressed table may become."""
    return max(MIN_EXPANDED_LIMIT, MAX_EXPANSION * path.stat().st_size)


def open_table(path: Path) -> BinaryIO:
    """Open a CSV table, which may lie under zstd.

    Raises:
        InputError: when it is no plain file, or lies under zstd, which is not installed.
        OSError: when it cannot be opened.

    """
    file = open_file(path)
    if path.suffix != ".zst":
        return file
    return io.BufferedReader(_Decompressed(file, path), PIECE_BYTES)


class _Decompressed(io.RawIOBase):
    """What a file under zstd holds, up to what it may become."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        try:
            import zstandard
        except ImportError:
            file.close()
            raise InputError(f"{path}: lies under zstd; allowed: pip install 'trainsentry[zstd]'") from None
        self._wrong = zstandard.ZstdError
        self._reader: Any = zstandard.ZstdDecompressor().stream_reader(file, closefd=True)
        self._path = path
        self._most = allowed_bytes(path)
        self._read = 0

    def tell(self) -> int:
        return self._read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            count: int = self._reader.readinto(buffer)
        except (self._wrong, MemoryError) as error:
            raise InputError(f"{self._path}: {error}") from None
        self._read += count
        if self._read > self._most:
            raise InputError(f"{self._path}: becomes more than {MAX_EXPANSION} times its size")
        return count

    def close(self) -> None:
        if not self.closed:
            self._reader.close()
        super().close()


def skip(stream: BinaryIO, at: int, offset: int) -> int:
    """Go from `at`, where line 2 begins, to `offset`; return the number of the line that begins there."""
    number, left = 2, offset - at
    while left > 0:
        data = stream.read(min(left, PIECE_BYTES))
        if not data:
            break
        number, left = number + data.count(b"\n"), left - len(data)
    return number


def pieces(stream: BinaryIO) -> Iterator[TablePiece]:
    """Yield the rest of a table in pieces."""
    rest = b""
    while data := stream.read(PIECE_BYTES):
        data = rest + data
        cut = _cut(data)
        rest = data[cut:]
        if cut:
            yield TablePiece(data[:cut], cut)
        if len(rest) > 2 * MAX_LINE_BYTES:  # what a quote holds back, and a line
            yield TablePiece(None, len(rest) + skip_line(stream))
            rest = b""
    if rest:
        yield TablePiece(rest, len(rest))


def _cut(data: bytes) -> int:
    """Return where the last whole line ends; a line break inside a quoted name does not end one."""
    plain = data.rfind(b"\n") + 1
    if data.count(b'"', 0, plain) % 2 == 0:
        return plain
    cut = data.rfind(b"\n", 0, data.rfind(b'"', 0, plain)) + 1
    # A quote that is never closed must not hold back the rest of the file.
    return cut if plain - cut < MAX_LINE_BYTES else plain


def line_count(path: Path) -> int:
    """Return how many lines a table has, its header counted; of one that cannot be read, as many as can."""
    if path.suffix == ".parquet":
        from trainsentry.exporters.csv.parquet import row_count

        return row_count(path) + 1
    count = 0
    try:
        with open_table(path) as stream:
            for data in iter(lambda: stream.read(PIECE_BYTES), b""):
                count += data.count(b"\n")
    except (InputError, OSError):
        pass
    return count
