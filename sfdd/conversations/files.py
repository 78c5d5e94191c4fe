"""Files of records: JSON lines, a JSON array, Parquet."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sfdd.artifacts import atomic_path, digest_files
from sfdd.conversations.formats import RECORD_KEYS
from sfdd.conversations.records import Record
from sfdd.errors import DataError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_PARQUET_BATCH = 256


@dataclass(frozen=True)
class _FileSource:
    path: Path

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def file_name(self) -> str:
        return self.path.name

    def fingerprint(self) -> str:
        return digest_files([self.path])


@dataclass(frozen=True)
class JsonLinesSource(_FileSource):
    """One JSON value a line. Only a line feed ends a line; blank lines are nothing."""

    def records(self) -> Iterator[Record]:
        for row, (number, line) in enumerate(self._lines()):
            try:
                yield Record(row, json.loads(line.removeprefix(BYTE_ORDER_MARK)))
            except (ValueError, RecursionError) as error:
                yield Record(row, error=f"line {number}: {error}")

    def count(self) -> int:
        return sum(1 for _ in self._lines())

    def write_kept(self, keep: Callable[[int], bool], destination: Path) -> None:
        with atomic_path(destination) as temporary, temporary.open("wb") as out:
            for row, (_, line) in enumerate(self._lines()):
                if keep(row):
                    out.write(line if line.endswith(b"\n") else line + b"\n")

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """1-based line number and bytes of every line that is not blank."""
        with self.path.open("rb") as handle:
            for number, line in enumerate(handle, start=1):
                if line.strip():
                    yield number, line


@dataclass(frozen=True)
class JsonSource(_FileSource):
    """A JSON array of records, or one record alone."""

    def records(self) -> Iterator[Record]:
        for row, (_, value, error) in enumerate(self._elements()):
            yield Record(row, value, error)

    def count(self) -> int:
        return sum(1 for _ in self._elements())

    def write_kept(self, keep: Callable[[int], bool], destination: Path) -> None:
        kept = [text for row, (text, _, _) in enumerate(self._elements()) if keep(row)]
        with atomic_path(destination) as temporary:
            array = "[\n" + ",\n".join(kept) + "\n]\n"
            temporary.write_bytes(array.encode("utf-8", errors="surrogateescape"))

    def _elements(self) -> Iterator[tuple[str, Any, str]]:
        """Original text, value and error of each element.

        A broken element hides what follows it, so it is the last; so is a missing end, or text behind
        the end.
        """
        text = self.path.read_text(encoding="utf-8-sig", errors="surrogateescape")
        position = _skip_space(text, 0)
        if text[position] != "[":
            yield text.strip(), json.loads(text), ""
            return
        decoder = json.JSONDecoder()
        position = _skip_space(text, position + 1)
        while text[position : position + 1] != "]":
            try:
                value, end = decoder.raw_decode(text, position)
            except (ValueError, RecursionError) as error:
                yield "", None, f"{error}; nothing after it could be read"
                return
            yield text[position:end], value, ""
            position = _skip_space(text, end)
            if text[position : position + 1] == ",":
                position = _skip_space(text, position + 1)
            elif text[position : position + 1] != "]":
                yield (
                    "",
                    None,
                    f"no ',' or ']' at character {position}; nothing after it could be read",
                )
                return
        if text[position + 1 :].strip():
            yield "", None, "there is text after the end of the array, which could not be read"


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


@dataclass(frozen=True)
class ParquetSource(_FileSource):
    """A row a record; columns keep their types when written back."""

    def records(self) -> Iterator[Record]:
        file = self._file()
        names = file.schema_arrow.names
        # A wide table costs nothing; one without any of them is read whole, to say what it has.
        columns = [name for name in RECORD_KEYS if name in names] or names
        row = 0
        try:
            for batch in file.iter_batches(batch_size=_PARQUET_BATCH, columns=columns):
                for value, error in _to_python(batch):
                    yield Record(row, value, error)
                    row += 1
        except OSError as error:
            raise DataError(
                f"{self.name} is damaged after record {row} ({error}). "
                "Records before it are scored; mend the file and run the command again."
            ) from error

    def count(self) -> int:
        return int(self._file().metadata.num_rows)

    def write_kept(self, keep: Callable[[int], bool], destination: Path) -> None:
        file = self._file()
        row = 0
        with (
            atomic_path(destination) as temporary,
            pq.ParquetWriter(temporary, file.schema_arrow) as writer,
        ):
            for batch in file.iter_batches():
                kept = [keep(row + i) for i in range(batch.num_rows)]
                writer.write_batch(batch.filter(pa.array(kept, pa.bool_())))
                row += batch.num_rows

    def _file(self) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(self.path)
        except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
            raise DataError(f"Cannot read {self.name} as Parquet: {error}") from error


def _to_python(batch: pa.RecordBatch) -> list[tuple[Any, str]]:
    """Value and error of each row; a cell that Python cannot hold spoils its own row alone."""
    try:
        return [(value, "") for value in batch.to_pylist()]
    except (ValueError, OverflowError) as error:
        if batch.num_rows == 1:
            return [(None, str(error))]
    return [pair for i in range(batch.num_rows) for pair in _to_python(batch.slice(i, 1))]
