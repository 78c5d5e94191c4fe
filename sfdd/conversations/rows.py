"""Rows of Arrow tables as the records they were before they were put into columns."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from sfdd.conversations.formats import RECORD_KEYS, format_of

_ROWS = 256
_BYTES = 8 << 20

_Convert = Callable[[Any], Any]


def conversation_columns(names: Sequence[str]) -> list[str]:
    """The columns to read: a wide table costs nothing.

    One whose columns make no conversation is read whole, to say what it has.
    """
    known = [name for name in RECORD_KEYS if name in names]
    makes_a_conversation = format_of({name: [] for name in known}) is not None
    return known if makes_a_conversation else list(names)


def rows_at_once(num_bytes: int, num_rows: int) -> int:
    """How many of such rows to hold as Python objects at a time."""
    return max(1, min(_ROWS, _BYTES * num_rows // max(num_bytes, 1)))


def to_python(batch: pa.RecordBatch, is_trusted: bool = True) -> Iterator[tuple[Any, str]]:
    """Value and error of each row; a cell that Python cannot hold spoils its own row alone.

    Args:
        is_trusted: False for what comes straight from a file, whose offsets may point anywhere.
    """
    convert = record_of(batch.schema)
    is_valid = is_trusted or _is_valid(batch)
    step = rows_at_once(batch.nbytes, batch.num_rows) if is_valid else 1
    for start in range(0, batch.num_rows, step):
        rows = batch.slice(start, step)
        if is_valid or _is_valid(rows):
            yield from _slice_to_python(rows, convert)
        else:
            yield None, "the row is damaged"


def _is_valid(batch: pa.RecordBatch) -> bool:
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _slice_to_python(batch: pa.RecordBatch, convert: _Convert) -> list[tuple[Any, str]]:
    try:
        return [(convert(value), "") for value in batch.to_pylist()]
    except (ValueError, OverflowError, RecursionError) as error:  # ArrowInvalid is a ValueError
        if batch.num_rows == 1:
            return [(None, first_line(error))]
    rows = (batch.slice(i, 1) for i in range(batch.num_rows))
    return [pair for row in rows for pair in _slice_to_python(row, convert)]


def _converter(type: pa.DataType) -> _Convert | None:
    """What makes a cell of a type the JSON value it was; None for one that is that already.

    Cells of `arrow.json` hold JSON text: so `datasets` keeps values whose type varies by row.
    """
    if getattr(type, "extension_name", "") == "arrow.json":
        return json.loads
    if pa.types.is_temporal(type) or pa.types.is_decimal(type):
        return str  # as it was before a reader of JSON took it for a date
    if pa.types.is_struct(type):
        return record_of(type)
    if pa.types.is_list(type) or pa.types.is_large_list(type) or pa.types.is_fixed_size_list(type):
        convert = _converter(type.value_type)
        return convert and _list(convert)
    return None


def record_of(fields: Sequence[pa.Field]) -> _Convert:
    """A struct has every field in every row, so a null in it says that the key is absent."""
    converters = {field.name: _converter(field.type) or _as_it_is for field in fields}
    return lambda value: {
        key: converters[key](item) for key, item in value.items() if item is not None
    }


def _list(convert: _Convert) -> _Convert:
    return lambda value: [None if item is None else convert(item) for item in value]


def _as_it_is(value: Any) -> Any:
    return value


def first_line(error: Exception) -> str:
    """What an error of Arrow says; the rest is its stack."""
    return str(error).partition("\n")[0]
