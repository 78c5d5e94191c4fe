"""What a file holds, told from its first megabyte: its name proves nothing."""

import ast
import csv
import io
import json
import re
from itertools import islice
from pathlib import Path
from typing import Any

from sfdd.conversations.files import JsonLinesSource, JsonSource
from sfdd.conversations.formats import format_of
from sfdd.conversations.json_values import read_values
from sfdd.conversations.records import Source
from sfdd.conversations.streams import ByteStream, Utf8Reader, decompressed, read_utf8
from sfdd.conversations.tables import (
    ARROW_FILE,
    ARROW_STREAM,
    PARQUET,
    ArrowSource,
    ParquetSource,
)
from sfdd.errors import DataError

HEAD = 1 << 20  # bytes, decompressed
_LINES = 16  # lines that are not blank; as many may be broken at the beginning of JSONL
_NO_JSON = object()

# Beginnings that are certainly something else, though there may be JSON further on.
_SOMETHING_ELSE = (
    (
        re.compile(rb"version https://git-lfs"),
        "is a Git LFS pointer, not the data: run 'git lfs pull' where it lies.",
    ),
    (
        re.compile(rb"\s*<(!doctype html|html|head)\b", re.IGNORECASE),
        "is an HTML page, not the data: download the file itself instead of the page that shows it.",
    ),
    (
        re.compile(rb"PK(\x03\x04|\x05\x06)"),
        "is a zip archive: unpack it and give the files in it.",
    ),
    (re.compile(rb"(?s).{257}ustar"), "is a tar archive: unpack it and give the files in it."),
    (
        re.compile(rb"BZh\d|\xfd7zXZ\0|\x04\x22\x4d\x18|7z\xbc\xaf"),
        "is compressed with something other than gzip or zstd: unpack it.",
    ),
)
_PYTHON_REPR = re.compile(r"\s*\[?\s*\{\s*'")
_TEMPLATE_TEXT = re.compile(
    r"<\|(im_start|start_header_id|begin_of_text|user|assistant|system|start|turn)\|?>"
    r"|\[INST\]|<start_of_turn>|<[|｜](User|Assistant)[|｜]>|<s>|<bos>"
)
_DELIMITERS = {",": "CSV", "\t": "TSV", ";": "CSV"}


def open_file(name: str, path: Path) -> Source:
    """The source that reads a file.

    Raises:
        DataError: it is empty, or nothing that sfdd reads; the sentence says what it looks like.
    """
    with io.BufferedReader(ByteStream(decompressed(path))) as stream:
        start = stream.read(512)
    if start.startswith(PARQUET):
        return ParquetSource(path)
    if start.startswith((ARROW_FILE, ARROW_STREAM)):
        return ArrowSource(path)
    for beginning, what in _SOMETHING_ELSE:
        if beginning.match(start):
            raise DataError(f"Data set {name} {what}")
    with read_utf8(path) as text:
        head = text.read(HEAD)
        is_whole = not text.read(1)
        is_damaged = bool(text.damage)
    if is_whole and not is_damaged and not head.strip():
        raise DataError(f"Data set {name} is empty. Give one with at least one record.")
    lines = _first_lines(head, is_whole)
    if not _TEMPLATE_TEXT.match(_text(head).lstrip()):  # the calls and tools in it are JSON
        if _is_json_lines(head, lines):
            return JsonLinesSource(path)
        if _is_json(head):
            return JsonSource(path)
    if is_damaged:
        return JsonLinesSource(path)
    raise DataError(f"Data set {name} {_looks_like(path, head, lines)}")


def _first_lines(head: bytes, is_whole: bool) -> list[str]:
    """The first lines that are whole and not blank."""
    lines = head.split(b"\n")
    whole = (line for line in (lines if is_whole else lines[:-1]) if line.strip())
    return [_text(line) for line in islice(whole, _LINES)]


def _is_json_lines(head: bytes, lines: list[str]) -> bool:
    """Whether every line is for itself, as opposed to one text whose values may span lines."""
    values = [_parsed(line) for line in lines]
    if not lines:
        return False
    first, second = values[0], values[1] if len(values) > 1 else _NO_JSON
    # An object that is indented is part of a value that spans lines.
    second_is_record = isinstance(second, dict) and not lines[1][0].isspace()
    if head.lstrip().startswith(b"["):
        # Lists of turns, one a line; a list of records is an array, though another may follow it.
        if isinstance(first, list) and second is not _NO_JSON:
            return not any(format_of(item) for item in first)
    elif isinstance(first, dict) or second_is_record or _NO_JSON not in values:
        return True
    beginning = next(read_values(_reader(head)), None)
    if beginning is None or not beginning.error or beginning.cut_off:
        return False
    return any(
        isinstance(value, dict | list) and not line[0].isspace()
        for line, value in zip(lines, values, strict=True)
    )


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return _NO_JSON


def _is_json(head: bytes) -> bool:
    """Whether some value can be read, or the only fault is that the file is cut off."""
    elements = list(read_values(_reader(head)))
    return any(not element.error or element.cut_off for element in elements) or (
        not elements and head.lstrip().startswith(b"[")
    )


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _reader(head: bytes) -> Utf8Reader:
    return Utf8Reader(iter([head]))


def _looks_like(path: Path, head: bytes, lines: list[str]) -> str:
    """What a file that holds no JSON looks like, and what to do about it."""
    text = _text(head)
    if _PYTHON_REPR.match(text) or (lines and _is_python_dict(lines[0])):
        return "looks like Python dict reprs, not JSON; write them with json.dumps."
    if _TEMPLATE_TEXT.search(text):
        return (
            "looks like rendered chat-template text; give the conversations that it was made from, "
            "as JSON, JSONL, Parquet or Arrow."
        )
    kind = path.suffix.removeprefix(".").upper() if path.suffix in (".csv", ".tsv") else ""
    if kind := kind or _delimited(lines):
        return (
            f"looks like {kind}, which sfdd does not read; convert it, for instance with pandas: "
            "read_csv(…).to_json(…, orient='records', lines=True)."
        )
    return "is not JSON, JSONL, Parquet or Arrow, neither plain nor compressed with gzip or zstd."


def _is_python_dict(line: str) -> bool:
    try:
        return isinstance(ast.literal_eval(line.strip()), dict)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False


def _delimited(lines: list[str]) -> str:
    """CSV or TSV if the first two rows have the same number of columns, and more than one."""
    for delimiter, kind in _DELIMITERS.items():
        try:
            header, row, *_ = csv.reader(lines, delimiter=delimiter)
        except (ValueError, csv.Error):
            continue
        if len(header) == len(row) > 1:
            return kind
    return ""
