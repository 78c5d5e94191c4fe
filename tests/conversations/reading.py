"""Reading a file and writing a part of it, checked on the way."""

from pathlib import Path
from typing import Any

from sfdd.conversations.records import Record
from sfdd.conversations.sources import open_source


def read(path: Path) -> list[Record]:
    """Every record, after checking that they are counted and numbered right."""
    source = open_source(str(path))
    records = list(source.records())
    assert [record.row for record in records] == list(range(len(records)))
    assert source.count() == len(records)
    return records


def values(path: Path) -> list[Any]:
    return [record.value for record in read(path)]


def kept(path: Path, rows: set[int], destination: Path) -> Path:
    open_source(str(path)).write_kept(rows.__contains__, destination)
    return destination
