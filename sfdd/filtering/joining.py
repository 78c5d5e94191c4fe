"""The user's own columns, joined to the score table by `id`: a Parquet, CSV or JSONL file."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json
import pyarrow.parquet as pq

from sfdd.conversations.streams import read_utf8
from sfdd.errors import DataError, UsageError
from sfdd.filtering.groups import encode, is_nested

_HEAD = 1000  # rows that show what columns there are
_MOST_KINDS = 50  # values that a column may have and still be a kind of conversation
_BLOCK = 64 << 20  # bytes: a record must fit into one
_CSV_PARSE = pa_csv.ParseOptions(newlines_in_values=True)


@dataclass(frozen=True)
class Joined:
    """The user's columns, a row for each of the score table.

    Attributes:
        columns: by the names they go by, without `id`; null where the user has no row of that id.
        kinds: which of the columns have few values, so that the report can count by them.
        matched: rows of the score table that the user has a row for.
    """

    columns: pa.Table
    kinds: tuple[str, ...]
    matched: int


def column_names(path: Path) -> list[str]:
    """What there is to join, `id` left out.

    Raises:
        DataError: the file cannot be read, or has no column `id`.
    """
    return [name for name in _head(path).column_names if name != "id"]


def join(
    path: Path, ids: pa.ChunkedArray, names: Mapping[str, str], wanted: Sequence[str]
) -> Joined:
    """Read the wanted columns and those that tell kinds, and put them in the order of `ids`.

    Args:
        names: in the file, by the names they go by.
        wanted: names that they go by; others are ignored.

    Raises:
        DataError: the file cannot be read, has an id twice, or has none of these ids.
    """
    head = _head(path)
    names = {
        name: own for name, own in names.items() if name in wanted or _has_few_values(head[own])
    }
    table = _read(path, pa.schema([head.schema.field(name) for name in ("id", *names.values())]))
    own_ids = pc.cast(table["id"], pa.string())
    _refuse_duplicates(path, own_ids)
    pa.default_memory_pool().release_unused()  # a table of all ids, and now another
    places = pc.index_in(ids, value_set=own_ids)
    pa.default_memory_pool().release_unused()
    matched = len(places) - places.null_count
    if not matched:
        raise DataError(
            f"None of the {len(own_ids):,} ids in {path} is one of the score table's: "
            f"{_first(own_ids)!r} there, {_first(ids)!r} here."
        )
    columns = pa.table({name: _narrow(table[own]).take(places) for name, own in names.items()})
    kinds = tuple(name for name in names if _has_few_values(columns[name]))
    return Joined(columns, kinds, matched)


def _narrow(column: pa.ChunkedArray) -> pa.ChunkedArray | pa.DictionaryArray:
    """Text that repeats takes less room as a dictionary."""
    is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
    return encode(column) if is_text else column


def _first(ids: pa.ChunkedArray) -> str:
    return ids[0].as_py() if len(ids) else ""


def _refuse_duplicates(path: Path, ids: pa.ChunkedArray) -> None:
    ids = pc.drop_null(ids)
    if pc.count_distinct(ids).as_py() < len(ids):
        counts = pc.value_counts(ids)
        several = counts.filter(pc.greater(counts.field("counts"), 1))
        raise DataError(
            f"{path} has the id {several.field('values')[0].as_py()!r} "
            f"{several.field('counts')[0].as_py()} times. Give every conversation one row."
        )


def _has_few_values(column: pa.ChunkedArray) -> bool:
    """Whether a column tells kinds of conversations; numbers with a fraction are measures."""
    type = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    countable = (
        pa.types.is_string(type)
        or pa.types.is_large_string(type)
        or pa.types.is_integer(type)
        or pa.types.is_boolean(type)
    )
    values = len(encode(column).dictionary) if countable else 0
    return 1 < values <= min(_MOST_KINDS, len(column) / 2)


def _kind(path: Path) -> str:
    suffixes = [suffix for suffix in path.suffixes if suffix not in (".gz", ".zst")]
    kind = suffixes[-1] if suffixes else ""
    if kind not in (".parquet", ".csv", ".jsonl", ".ndjson"):
        raise UsageError(f"--join is {path}; give a .parquet, .csv or .jsonl file.")
    return kind


def _head(path: Path) -> pa.Table:
    """The first rows, with every column of single values.

    Raises:
        DataError: the file cannot be read, or has no column `id`.
    """
    kind = _kind(path)
    try:
        path.stat()
        if kind == ".parquet":
            head = _parquet_head(path)
        elif kind == ".csv":
            with pa_csv.open_csv(path, parse_options=_CSV_PARSE) as reader:
                head = pa.Table.from_batches([reader.read_next_batch()]).slice(0, _HEAD)
        else:
            head = _jsonl_head(path)
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
        raise _unreadable(path, error) from error
    if "id" not in head.column_names:
        raise DataError(
            f"{path} has no column 'id' to join by; it has {', '.join(head.column_names) or 'none'}."
        )
    return head


def _parquet_head(path: Path) -> pa.Table:
    file = pq.ParquetFile(path, pre_buffer=False)
    names = [field.name for field in file.schema_arrow if not is_nested(field.type)]
    batches = islice(file.iter_batches(_HEAD, columns=names), 1)
    schema = pa.schema([file.schema_arrow.field(name) for name in names])
    return pa.Table.from_batches(list(batches), schema)


def _jsonl_head(path: Path) -> pa.Table:
    """Of single values alone, so that a data set with its messages can be joined to itself."""
    with read_utf8(path) as stream:
        lines = islice((line for line in stream if not line.isspace()), _HEAD)
        records = [json.loads(line) for line in lines]
    if not all(isinstance(record, dict) for record in records):
        raise ValueError("not every line is an object")
    columns: dict[str, list[object]] = {}
    for i, record in enumerate(records):
        for name, value in record.items():
            columns.setdefault(name, [None] * len(records))[i] = value
    fields = {name: _type_of(values) for name, values in columns.items()}
    return pa.table(
        {
            name: pa.array(columns[name], type, from_pandas=False)
            for name, type in fields.items()
            if type is not None
        }
    )


def _type_of(values: Sequence[object]) -> pa.DataType | None:
    """Of a column of JSON; None where it holds more than single values of one kind."""
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {str}:  # what is null so far, too
        return pa.string()
    if kinds == {bool}:
        return pa.bool_()
    if kinds == {int}:
        return pa.int64()
    return pa.float64() if kinds <= {int, float} else None


def _read(path: Path, schema: pa.Schema) -> pa.Table:
    """The columns of a schema; whole numbers may turn out to have fractions further down."""
    try:
        if _kind(path) == ".parquet":
            return pq.read_table(path, columns=schema.names)
        read = _read_csv if _kind(path) == ".csv" else _read_jsonl
        try:
            return read(path, schema)
        except pa.ArrowInvalid:
            return read(path, _widened(schema))
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def _read_csv(path: Path, schema: pa.Schema) -> pa.Table:
    """Ids as they are written: 007 is not 7."""
    types = {field.name: field.type for field in schema} | {"id": pa.string()}
    options = pa_csv.ConvertOptions(include_columns=schema.names, column_types=types)
    return pa_csv.read_csv(path, parse_options=_CSV_PARSE, convert_options=options)


def _read_jsonl(path: Path, schema: pa.Schema) -> pa.Table:
    return pa_json.read_json(
        path,
        pa_json.ReadOptions(block_size=_BLOCK),
        pa_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
    )


def _widened(schema: pa.Schema) -> pa.Schema:
    return pa.schema(
        [
            field.with_type(pa.float64())
            if pa.types.is_integer(field.type) and field.name != "id"
            else field
            for field in schema
        ]
    )


def _unreadable(path: Path, error: Exception) -> DataError:
    reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
    return DataError(f"Cannot read {path} to join it: {reason}")
