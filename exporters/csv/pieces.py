"""Reads a table, plain or under zstd, in pieces of whole lines, with limits on line length and decompressed size."""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from trainsentry.exporters.files.foreign_files import InputError, open_file, skip_line

PIECE_BYTES: Final = 4 << 20
"""Bytes read at a time: large enough to hide pandas' overhead per piece, small beside its memory."""

MAX_LINE_BYTES: Final = 1 << 16
"""Bytes of a line at most: a name has about a hundred, forty numbers about a thousand."""

MAX_EXPANSION: Final = 1000
"""Decompressed size at most, as a multiple of the file's: tables of one constant reach 400."""

MIN_EXPANDED_LIMIT: Final = 1 << 26
"""Bytes that any table may decompress to; reading them piece by piece takes less than a second."""


@dataclass(frozen=True, slots=True)
class TablePiece:
    """Bytes up to the end of a line or file; `data` is None for `size` bytes of a line that is too long."""

    data: bytes | None
    size: int


def allowed_bytes(path: Path) -> int:
    """Return the decompressed bytes that a table may have."""
    return max(MIN_EXPANDED_LIMIT, MAX_EXPANSION * path.stat().st_size)


def open_table(path: Path) -> BinaryIO:
    """Open a CSV table, plain or under zstd.

    Raises:
        InputError: when it is not a regular file, or is under zstd and zstandard is not installed.
        OSError: when it cannot be opened.

    """
    file = open_file(path)
    if path.suffix != ".zst":
        return file
    return io.BufferedReader(_Decompressed(file, path), PIECE_BYTES)


class _Decompressed(io.RawIOBase):
    """The decompressed bytes of a file under zstd, up to `allowed_bytes`."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        try:
            import zstandard
        except ImportError:
            file.close()
            raise InputError(f"{path}: is compressed by zstd; allowed: pip install 'trainsentry[zstd]'") from None
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
            raise InputError(f"{self._path}: decompresses to more than {MAX_EXPANSION} times its size")
        return count

    def close(self) -> None:
        if not self.closed:
            self._reader.close()
        super().close()


def skip(stream: BinaryIO, at: int, offset: int) -> int:
    """Skip from `at`, where line 2 begins, to `offset`; return the number of the line that begins there."""
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
        if len(rest) > 2 * MAX_LINE_BYTES:  # an open quote may hold back one line's worth
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
    # An unclosed quote must not hold back the rest of the file.
    return cut if plain - cut < MAX_LINE_BYTES else plain


def line_count(path: Path) -> int:
    """Return the number of lines of a table, including its header; of a damaged file, the readable ones."""
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
