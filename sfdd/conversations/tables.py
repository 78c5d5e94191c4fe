"""Files of record tables: Parquet and Arrow, a row a record. Rows keep their types when written back."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, repeat
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from sfdd.artifacts import atomic_path
from sfdd.conversations.files import FileSource
from sfdd.conversations.records import Record
from sfdd.conversations.rows import (
    conversation_columns,
    first_line,
    record_of,
    rows_at_once,
    to_python,
)
from sfdd.conversations.streams import DamageError, compression, decompressed
from sfdd.errors import DataError

PARQUET, ARROW_FILE, ARROW_STREAM = b"PAR1", b"ARROW1\0\0", b"\xff\xff\xff\xff"
_BUFFER = 1 << 20  # bytes of a column read at once, however large its chunks are
_ROW_GROUP = 32 << 20  # bytes of kept rows that are written together
_ROWS_WRITTEN = 1000  # of an Arrow batch, which may be as large as the file
_UNREADABLE = (OSError, ValueError, pa.ArrowException, NotImplementedError)


@dataclass(frozen=True)
class _Unpacked:
    """A temporary copy of a compressed file; it goes with its source."""

    file: IO[bytes]
    damage: str


@dataclass(frozen=True)
class TableSource(FileSource):
    """A file that is read at places of its own choosing, so that a compressed one is unpacked first."""

    @property
    def file_name(self) -> str:
        """Without .gz or .zst: kept rows are written as a plain table, compressed in itself."""
        packed = self.path.suffix in (".gz", ".zst") and compression(self.path)
        return self.path.stem if packed else self.path.name

    @property
    def _plain(self) -> Path:
        return Path(self._unpacked.file.name) if self._unpacked else self.path

    @property
    def _damage(self) -> str:
        return self._unpacked.damage if self._unpacked else ""

    @cached_property
    def _unpacked(self) -> _Unpacked | None:
        if not compression(self.path):
            return None
        damage = ""
        try:
            file = tempfile.NamedTemporaryFile(prefix="sfdd-")  # noqa: SIM115 - goes with the source
            try:
                for chunk in decompressed(self.path):
                    file.write(chunk)
            except DamageError as error:
                damage = str(error)
            file.flush()
        except OSError as error:
            raise DataError(
                f"Cannot unpack {self.name} into {tempfile.gettempdir()}: {error.strerror or error}. "
                "Unpack it by hand, or set TMPDIR to a folder with more room."
            ) from error
        return _Unpacked(file, damage)


@dataclass(frozen=True)
class ParquetSource(TableSource):
    """A Parquet file. A damaged row group costs its own rows, each a record with an error."""

    def records(self) -> Iterator[Record]:
        """The rows, with only the columns of a conversation."""
        file = self._file()
        columns = conversation_columns(file.schema_arrow.names)
        start = 0
        for group, size in enumerate(_group_sizes(file)):
            rows = islice(_read_group(file, group, columns), size)
            for row, (value, error) in enumerate(rows, start=start):
                yield Record(row, value, error)
            start += size

    def count(self) -> int:
        """From the footer."""
        return sum(_group_sizes(self._file()))

    def write_kept(self, keep: Callable[[int], bool], destination: Path) -> None:
        """The rows with all of their columns."""
        file = self._file()
        with (
            atomic_path(destination) as temporary,
            pq.ParquetWriter(temporary, file.schema_arrow) as writer,
        ):
            for table in _gathered(self._kept(file, keep)):
                writer.write_table(table)

    def _kept(self, file: pq.ParquetFile, keep: Callable[[int], bool]) -> Iterator[pa.RecordBatch]:
        start = 0
        for group, size in enumerate(_group_sizes(file)):
            row, start = start, start + size
            try:
                for batch in _batches_of(file, group, None):
                    yield _filtered(batch, row, keep)
                    row += batch.num_rows
            except _UNREADABLE as error:
                if any(map(keep, range(row, start))):
                    raise DataError(
                        f"Cannot copy records {row} to {start - 1} of {self.name}, "
                        f"whose other columns are damaged: {first_line(error)}."
                    ) from error

    def _file(self) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(
                pa.OSFile(str(self._plain)),
                buffer_size=_BUFFER,
                pre_buffer=False,
                page_checksum_verification=True,
            )
        except _UNREADABLE as error:
            reason = self._damage or first_line(error)
            raise DataError(f"Cannot read {self.name} as Parquet: {reason}") from error


@dataclass(frozen=True)
class ArrowSource(TableSource):
    """An Arrow IPC file or stream, such as the caches of `datasets`. Both are read as a stream.

    Where it is damaged it ends, with one record that says so.
    """

    def records(self) -> Iterator[Record]:
        """The rows, with only the columns of a conversation."""
        row = 0
        try:
            for batch in self._batches():
                columns = conversation_columns(batch.schema.names)
                for value, error in to_python(batch.select(columns), is_trusted=False):
                    yield Record(row, value, error)
                    row += 1
        except DamageError as damage:
            yield Record(row, error=f"row {row}: {damage}")

    def count(self) -> int:
        """Of the rows of its batches, and of the damage."""
        rows = 0
        try:
            for batch in self._batches():
                rows += batch.num_rows
        except DamageError:
            rows += 1
        return rows

    def write_kept(self, keep: Callable[[int], bool], destination: Path) -> None:
        """The rows with all of their columns, as the kind of Arrow file they came in."""
        is_file, reader = self._reader()
        new = pa.ipc.new_file if is_file else pa.ipc.new_stream
        row = 0
        with (
            atomic_path(destination) as temporary,
            new(str(temporary), reader.schema) as writer,
            suppress(DamageError),  # what lies behind it has never been a record
        ):
            for batch in self._batches():
                for start in range(0, batch.num_rows, _ROWS_WRITTEN):
                    part = batch.slice(start, _ROWS_WRITTEN)
                    writer.write_batch(_filtered(part, row + start, keep))
                row += batch.num_rows

    def _batches(self) -> Iterator[pa.RecordBatch]:
        _, reader = self._reader()
        try:
            for batch in reader:
                batch.validate()  # that it has as many rows as it says
                yield batch
        except _UNREADABLE as error:
            raise DamageError(f"the file is damaged or cut off ({first_line(error)})") from error
        if self._damage:
            raise DamageError(self._damage)

    def _reader(self) -> tuple[bool, pa.RecordBatchStreamReader]:
        """Whether it is a file, which is a stream with something before and behind it; and the stream."""
        # Mapped, because a batch may be as large as the file.
        file = pa.memory_map(str(self._plain))
        is_file = file.read_at(len(ARROW_FILE), 0) == ARROW_FILE
        if is_file:
            file.seek(len(ARROW_FILE))
        try:
            reader = pa.ipc.open_stream(file)
            record_of(reader.schema)  # raises for damaged names
            return is_file, reader
        except _UNREADABLE as error:
            reason = self._damage or first_line(error)
            raise DataError(f"Cannot read {self.name} as Arrow: {reason}") from error


def _group_sizes(file: pq.ParquetFile) -> list[int]:
    return [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]


def _batches_of(
    file: pq.ParquetFile, group: int, columns: list[str] | None
) -> Iterator[pa.RecordBatch]:
    about = file.metadata.row_group(group)
    size = rows_at_once(about.total_byte_size, about.num_rows)
    yield from file.iter_batches(size, row_groups=[group], columns=columns)


def _read_group(file: pq.ParquetFile, group: int, columns: list[str]) -> Iterator[tuple[Any, str]]:
    """Value and error of each row of a row group, and without end the error of what follows damage."""
    reason = "it has too few rows"
    try:
        for batch in _batches_of(file, group, columns):
            yield from to_python(batch)
    except _UNREADABLE as error:
        reason = first_line(error)
    yield from repeat((None, f"row group {group} is damaged: {reason}"))


def _filtered(batch: pa.RecordBatch, start: int, keep: Callable[[int], bool]) -> pa.RecordBatch:
    kept = [keep(row) for row in range(start, start + batch.num_rows)]
    return batch.filter(pa.array(kept, pa.bool_()))


def _gathered(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Batches put together, so that row groups do not become as small as batches."""
    pending: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        pending.append(batch)
        size += batch.nbytes
        if size > _ROW_GROUP:
            yield pa.Table.from_batches(pending)
            pending, size = [], 0
    if pending:
        yield pa.Table.from_batches(pending)
