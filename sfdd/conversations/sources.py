"""Chat data sets as the user has them: read record by record, and written back in part, untouched.

Nothing is decided here about what a record means. A record that cannot be read is handed on with the
reason, so that it is counted; only a data set that cannot be opened at all is an error.
"""

import io
import json
from pathlib import Path

from sfdd.conversations.files import (
    BYTE_ORDER_MARK,
    JsonLinesSource,
    JsonSource,
    ParquetSource,
)
from sfdd.conversations.hub import DatasetSource
from sfdd.conversations.records import Source
from sfdd.errors import DataError


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
            handle.seek(len(BYTE_ORDER_MARK) if head.startswith(BYTE_ORDER_MARK) else 0)
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
