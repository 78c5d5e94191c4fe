"""A file as a stream of UTF-8 bytes, whatever it is compressed with and encoded in.

Memory does not grow with the file. Damage (a cut-off download, a flipped bit) ends a stream early instead
of raising: what lies before it is data, and whoever reads to the end finds the reason in `damage`.
"""

import codecs
import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from sfdd.errors import DataError

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
CHUNK = 128 * 1024  # bytes read, decompressed or decoded at once
_LONGEST_MAGIC = 8
_GZIP_LEVEL = 6
_BYTE_ORDER_MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}


class DamageError(Exception):
    """The data end here, in the middle; `str(error)` says why."""


class ByteStream(io.RawIOBase):
    """Some chunks of bytes as a file that ends where they are damaged; then `damage` says why."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = memoryview(b"")
        self.damage = ""

    def readable(self) -> bool:
        """True; `io` asks."""
        return True

    def readinto(self, buffer: "bytearray | memoryview[int]") -> int:  # type: ignore[override]
        """Fill as much of `buffer` as the next chunk has; 0 at the end."""
        while not self._rest:
            try:
                self._rest = memoryview(next(self._chunks))
            except StopIteration:
                return 0
            except DamageError as damage:
                self.damage = str(damage)
                self._chunks = iter(())
                return 0
        size = min(len(buffer), len(self._rest))
        buffer[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size


class Utf8Reader(io.BufferedReader):
    """A buffered `ByteStream`: lines end at a line feed and nowhere else."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._stream = ByteStream(chunks)
        super().__init__(self._stream, CHUNK)

    @property
    def damage(self) -> str:
        """Why the data end too early; "" if they do not, or their end has not been reached yet."""
        return self._stream.damage


def compression(path: Path) -> bytes:
    """The magic bytes of what a file is compressed with, by its content; b"" if it is not."""
    with reading(path), path.open("rb") as handle:
        head = handle.read(4)
    return next((magic for magic in (GZIP, ZSTD) if head.startswith(magic)), b"")


def read_utf8(path: Path) -> Utf8Reader:
    """A file as UTF-8 without a byte order mark."""
    return Utf8Reader(_as_utf8(decompressed(path)))


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Make a DataError of what the disk refuses."""
    try:
        yield
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror or error}.") from error


@contextmanager
def write_compressed(path: Path, magic: bytes) -> Iterator[BinaryIO]:
    """Write a file with the compression that has these magic bytes; the same data make the same file."""
    with path.open("wb") as file:
        if magic == GZIP:
            with gzip.GzipFile("", "wb", _GZIP_LEVEL, file, mtime=0) as out:
                yield out  # type: ignore[misc]  # it has what a BinaryIO has
        elif magic == ZSTD:
            with pa.CompressedOutputStream(pa.PythonFile(file, "w"), "zstd") as out:
                yield out
        else:
            yield file


def decompressed(path: Path) -> Iterator[bytes]:
    """The bytes of a file in chunks.

    Raises:
        DamageError: after the last byte that could be had.
    """
    magic = compression(path)
    if magic == GZIP:
        yield from _gunzipped(_stored(path))
    elif magic == ZSTD:
        yield from _unzstd(path)
    else:
        yield from _stored(path)


def _stored(path: Path) -> Iterator[bytes]:
    with reading(path), path.open("rb", buffering=0) as handle:
        while chunk := handle.read(CHUNK):
            yield chunk


def _gunzipped(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """zlib itself instead of `gzip`: that drops what it has decompressed when it meets damage."""
    member = zlib.decompressobj(wbits=31)
    fresh = True
    for data in chunks:
        while True:
            if fresh and not (data := data.lstrip(b"\0")):  # members may be padded
                break
            before = member.copy()
            try:
                out = member.decompress(data, CHUNK)
            except zlib.error as error:
                yield _up_to_the_damage(before, data)
                raise _damaged(error) from error
            yield out
            fresh = member.eof
            data = member.unused_data if fresh else member.unconsumed_tail
            if fresh:
                member = zlib.decompressobj(wbits=31)
            elif not data and len(out) < CHUNK:
                break
    if not fresh:
        raise _damaged("no end of the stream")


def _up_to_the_damage(member: "zlib._Decompress", data: bytes) -> bytes:
    """What can still be had of data that raise as a whole."""
    whole = bytearray()
    with suppress(zlib.error):
        for i in range(len(data)):
            whole += member.decompress(data[i : i + 1])
    return bytes(whole)


def _unzstd(path: Path) -> Iterator[bytes]:
    """All frames of a zstd file.

    Arrow drops what it has decompressed when it meets damage, so then the last chunk is read again from a
    new stream, byte by byte.
    """
    done = 0
    try:
        with pa.input_stream(str(path), compression="zstd", buffer_size=0) as stream:
            while chunk := stream.read(CHUNK):
                done += len(chunk)
                yield chunk
    except OSError as error:
        if error.errno is not None:
            raise DataError(f"Cannot read {path}: {error.strerror or error}.") from error
        yield _unzstd_again(path, done)
        raise _damaged(error) from error


def _unzstd_again(path: Path, start: int) -> bytes:
    """What lies between `start` and the damage."""
    whole = bytearray()
    with (
        suppress(OSError),
        pa.input_stream(str(path), compression="zstd", buffer_size=0) as stream,
    ):
        while start:
            start -= len(stream.read(min(start, CHUNK)))
        while byte := stream.read(1):
            whole += byte
    return bytes(whole)


def _damaged(reason: object) -> DamageError:
    return DamageError(f"the compressed data are damaged or cut off ({reason})")


def _as_utf8(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Without byte order mark; UTF-16 made UTF-8. Bytes that are not UTF-8 stay what they are."""
    head = b""
    damage = None
    try:
        while len(head) < 4 and (chunk := next(chunks, b"")):
            head += chunk
    except DamageError as error:
        damage = error
    encoding, mark = _encoding(head)
    head = head[len(mark) :]
    if encoding == "utf-8":
        yield head
        if damage:
            raise damage
        yield from chunks
        return
    decoder = codecs.getincrementaldecoder(encoding)("surrogatepass")
    try:
        yield decoder.decode(head).encode("utf-8", "surrogatepass")
        if damage:
            raise damage
        for chunk in chunks:
            yield decoder.decode(chunk).encode("utf-8", "surrogatepass")
        yield decoder.decode(b"", final=True).encode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise DamageError(f"the UTF-16 text is damaged or cut off ({error.reason})") from error


def _encoding(head: bytes) -> tuple[str, bytes]:
    """Encoding and byte order mark of a text that begins so.

    JSON begins with ASCII characters, whose other byte in UTF-16 is zero.
    """
    for mark, encoding in _BYTE_ORDER_MARKS.items():
        if head.startswith(mark):
            return encoding, mark
    zeros = [byte == 0 for byte in head[:4]]
    if zeros in ([False, True], [False, True] * 2):
        return "utf-16-le", b""
    if zeros in ([True, False], [True, False] * 2):
        return "utf-16-be", b""
    return "utf-8", b""
