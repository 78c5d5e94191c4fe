"""Chat data sets as the user has them: read record by record, and written back in part, untouched.

Nothing is decided here about what a record means. A record that cannot be read is handed on with the
reason, so that it is counted; only a data set that cannot be opened at all is an error.
"""

import json
import re
from pathlib import Path

from sfdd.conversations.files import (
    BYTE_ORDER_MARK,
    JsonLinesSource,
    JsonSource,
    ParquetSource,
)
from sfdd.conversations.messages import is_unicode
from sfdd.conversations.hub import DatasetSource
from sfdd.conversations.records import Source
from sfdd.errors import DataError

_FILE_SUFFIXES = (".jsonl", ".json", ".parquet", ".gz", ".zst", ".txt", ".csv", ".arrow")
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def open_source(name: str) -> Source:
    """Recognise a data set by what it holds.

    Args:
        name: a JSONL, JSON or Parquet file, a folder made by `Dataset.save_to_disk`, or a hub id
            (`org/name`, `hf:org/name:split` or `hf:org/name:config:split`).

    Raises:
        DataError: it does not exist, is empty, or is none of these.
    """
    if not is_unicode(name):
        raise DataError(f"The name of data set {name!r} is not valid UTF-8; rename it.")
    if name.startswith("hf:"):
        return DatasetSource.from_hub(name)
    path = Path(name).expanduser().resolve()
    if path.is_dir():
        return DatasetSource.from_disk(name, path)
    if path.is_file():
        return _open_file(name, path)
    if path.exists() or path.suffix in _FILE_SUFFIXES or not _HUB_ID.fullmatch(name):
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
                return ParquetSource(path)
            handle.seek(len(BYTE_ORDER_MARK) if head.startswith(BYTE_ORDER_MARK) else 0)
            lines = (line.strip() for line in handle if not line.isspace())
            first, second = next(lines, b""), next(lines, b"")
    except OSError as error:
        raise DataError(f"Cannot read {name}: {error.strerror}.") from error
    if not first:
        raise DataError(f"Data set {name} is empty. Give one with at least one record.")
    if second and _is_json(first):
        return JsonLinesSource(path)
    if first.startswith(b"[") or (first.startswith(b"{") and second and _is_json_file(path)):
        return JsonSource(path)
    return JsonLinesSource(path)


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _is_json_file(path: Path) -> bool:
    """One pretty-printed object, as opposed to JSONL whose first line is broken."""
    return _is_json(path.read_bytes())


def expand_names(names: list[str]) -> list[str]:  # stand-in until globs are here
    return list(names)
