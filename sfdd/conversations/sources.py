"""Chat data sets as the user has them: read record by record, and written back in part, untouched.

Nothing is decided here about what a record means. A record that cannot be read is handed on with the
reason, so that it is counted; only a data set that cannot be opened at all is an error.
"""

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from sfdd.artifacts import atomic_path, digest_files
from sfdd.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_PARQUET_BATCH = 256


@dataclass(frozen=True)
class Record:
    """One record: its 0-based position, and its value or why it has none."""

    row: int
    value: Any = None
    error: str = ""


class Source(Protocol):
    """One data set of the user's."""

    @property
    def name(self) -> str:
        """As the user wrote it."""

    @property
    def location(self) -> str:
        """Where it is, whatever folder sfdd is started from."""

    def records(self) -> Iterator[Record]:
        """Every record in order, readable or not."""

    def count(self) -> int:
        """How many records there are, found without parsing them where that is possible."""

    def fingerprint(self) -> str:
        """Identity of the content; reads all of it."""

    @property
    def file_name(self) -> str:
        """What to call a file of its records."""

    def write_kept(self, keep: Callable[[int], bool], destination: Path) -> None:
        """Write the records whose row is kept, in the same format, order and wording."""


def open_source(name: str) -> Source:
    """Recognise a data set by what it holds.

    Args:
        name: a JSONL, JSON or Parquet file, a folder made by `Dataset.save_to_disk`, or a hub id
            (`org/name`, or `hf:org/name[:config][:split]`).

    Raises:
        DataError: it does not exist, is empty, or is none of these.
    """
    path = Path(name).expanduser()
    if name.startswith("hf:"):
        return DatasetSource.from_hub(name)
    if path.is_dir():
        return DatasetSource.from_disk(name, path)
    if path.is_file():
        return _open_file(name, path)
    if path.suffix or name.count("/") != 1 or name.startswith((".", "~")):
        raise DataError(
            f"Data set {name} does not exist. Give a JSONL, JSON or Parquet file, a folder made by "
            "save_to_disk, or a hub id such as org/name."
        )
    return DatasetSource.from_hub(name)


def _open_file(name: str, path: Path) -> Source:
    try:
        with path.open("rb") as handle:
            head = handle.read(4)
            if head == b"PAR1":
                return ParquetSource(name, path)
            handle.seek(len(_BYTE_ORDER_MARK) if head.startswith(_BYTE_ORDER_MARK) else 0)
            start = _first_line(handle)
    except OSError as error:
        raise DataError(f"Cannot read {name}: {error.strerror}.") from error
    if not start:
        raise DataError(f"Data set {name} is empty. Nothing was written.")
    if start.startswith(b"[") or (
        start.startswith(b"{") and not _is_json(start) and _is_json_file(path)
    ):
        return JsonSource(name, path)
    return JsonLinesSource(name, path)


def _first_line(handle: io.BufferedReader) -> bytes:
    return next((line.strip() for line in handle if line.strip()), b"")


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _is_json_file(path: Path) -> bool:
    """One pretty-printed object, as opposed to JSONL whose first line is broken."""
    return _is_json(path.read_bytes())


@dataclass(frozen=True)
class _FileSource:
    name: str
    path: Path

    @property
    def location(self) -> str:
        return str(self.path.absolute())

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
                yield Record(row, json.loads(line.removeprefix(_BYTE_ORDER_MARK)))
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
            temporary.write_text("[\n" + ",\n".join(kept) + "\n]\n", encoding="utf-8")

    def _elements(self) -> Iterator[tuple[str, Any, str]]:
        """Original text, value and error of each element; a broken one hides what follows it."""
        decoder = json.JSONDecoder()
        text = self.path.read_text(encoding="utf-8-sig", errors="surrogateescape")
        position = _skip_space(text, 0)
        if text[position] != "[":
            yield text.strip(), json.loads(text), ""
            return
        position = _skip_space(text, position + 1)
        while position < len(text) and text[position] != "]":
            try:
                value, end = decoder.raw_decode(text, position)
                after = _skip_space(text, end)
                if text[after : after + 1] not in (",", "]"):
                    raise json.JSONDecodeError("Expecting ',' delimiter", text, after)
            except (ValueError, RecursionError) as error:
                yield "", None, f"{error}; nothing after it could be read"
                return
            yield text[position:end], value, ""
            position = _skip_space(text, after + 1) if text[after] == "," else after


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


@dataclass(frozen=True)
class ParquetSource(_FileSource):
    """A row a record; columns keep their types when written back."""

    def records(self) -> Iterator[Record]:
        row = 0
        for batch in self._file().iter_batches(batch_size=_PARQUET_BATCH):
            for value in batch.to_pylist():
                yield Record(row, value)
                row += 1

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


@dataclass(frozen=True)
class DatasetSource:
    """A `datasets` data set, from a saved folder or the hub."""

    name: str
    location: str
    dataset: "Dataset" = field(repr=False)

    @classmethod
    def from_disk(cls, name: str, path: Path) -> "DatasetSource":
        from datasets import load_from_disk

        try:
            loaded = load_from_disk(str(path))
        except Exception as error:
            raise DataError(
                f"Folder {name} is not a data set made by save_to_disk ({error}). "
                "Name the files in it instead."
            ) from error
        return cls(name, str(path.absolute()), _only_split(name, loaded))

    @classmethod
    def from_hub(cls, name: str) -> "DatasetSource":
        from datasets import load_dataset

        repository, *rest = name.removeprefix("hf:").split(":")
        configuration = rest[0] if len(rest) > 1 else None
        split = rest[-1] if rest else None
        try:
            loaded = load_dataset(repository, configuration, split=split)
        except Exception as error:
            first_line = next(iter(str(error).splitlines()), type(error).__name__)
            raise DataError(
                f"Data set {name} is neither a file here nor a hub data set that can be loaded: "
                f"{first_line}"
            ) from error
        return cls(name, name, _only_split(name, loaded))

    def records(self) -> Iterator[Record]:
        for row, value in enumerate(self.dataset):
            yield Record(row, value)

    def count(self) -> int:
        return len(self.dataset)

    @property
    def file_name(self) -> str:
        return f"{Path(self.name.removeprefix('hf:').replace(':', '-')).name}.parquet"

    def fingerprint(self) -> str:
        return str(self.dataset._fingerprint)

    def write_kept(self, keep: Callable[[int], bool], destination: Path) -> None:
        rows = [row for row in range(len(self.dataset)) if keep(row)]
        with atomic_path(destination) as temporary:
            self.dataset.select(rows).to_parquet(str(temporary))


def _only_split(name: str, loaded: Any) -> "Dataset":
    """The data set itself, `train` of several splits, or the only one."""
    if not isinstance(loaded, dict):
        return loaded
    if "train" in loaded:
        return loaded["train"]
    if len(loaded) == 1:
        return next(iter(loaded.values()))
    raise DataError(
        f"Data set {name} has the splits {', '.join(loaded)}; name one: hf:{name}:SPLIT."
    )
