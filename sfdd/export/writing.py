"""Rows of JSONL and Parquet, one after another, never all in memory."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from sfdd.export.trainers import TextForm

Write: TypeAlias = Callable[[Mapping[str, Any]], None]
_ROWS_AT_ONCE = 1000
# What `str.splitlines`, by which some loaders read, takes for a line's end, and JSON does not escape.
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}


@contextmanager
def json_lines(path: Path) -> Iterator[Write]:
    """Give the function that writes a row of JSONL."""
    with path.open("w", encoding="utf-8", newline="\n") as file:

        def write(row: Mapping[str, Any]) -> None:
            file.write(json.dumps(row, ensure_ascii=False).translate(_LINE_ENDS) + "\n")

        yield write


@contextmanager
def parquet_turns(path: Path, form: TextForm, writes_reasoning: bool) -> Iterator[Write]:
    """Give the function that writes a row of Parquet: `id`, and a list of turns of strings."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    keys = [form.role, form.content, *(["reasoning_content"] if writes_reasoning else [])]
    turn = pa.struct([pa.field(key, pa.string()) for key in keys])
    schema = pa.schema([pa.field("id", pa.string()), pa.field(form.turns, pa.list_(turn))])
    rows: list[Mapping[str, Any]] = []
    with pq.ParquetWriter(path, schema) as writer:

        def flush() -> None:
            if rows:
                writer.write_table(pa.Table.from_pylist(rows, schema))
                rows.clear()

        def write(row: Mapping[str, Any]) -> None:
            rows.append(row)
            if len(rows) == _ROWS_AT_ONCE:
                flush()

        yield write
        flush()
