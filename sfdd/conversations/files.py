"""Files of JSON records: line by line, or one value after another."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sfdd.artifacts import atomic_path, digest_files
from sfdd.conversations.json_values import Element, read_values
from sfdd.conversations.records import Record
from sfdd.conversations.streams import CHUNK, compression, read_utf8, write_compressed


@dataclass(frozen=True)
class FileSource:
    """What all files of records have in common."""

    path: Path

    @property
    def name(self) -> str:
        """The whole path."""
        return str(self.path)

    @property
    def file_name(self) -> str:
        """That of the file itself."""
        return self.path.name

    def fingerprint(self) -> str:
        """Of the bytes on the disk, compressed or not."""
        return digest_files([self.path])


@dataclass(frozen=True)
class JsonLinesSource(FileSource):
    """One JSON value a line. Only a line feed ends a line; blank lines are nothing."""

    def records(self) -> Iterator[Record]:
        """Every line; one that is no JSON with its number and what is wrong with it."""
        for row, (number, line, error) in enumerate(self._lines()):
            if error:
                yield Record(row, error=error)
                continue
            try:
                yield Record(row, parse_line(line))
            except json.JSONDecodeError as wrong:
                yield Record(row, error=f"line {number}: {wrong.msg} at character {wrong.pos}")
            except (ValueError, RecursionError) as wrong:
                yield Record(row, error=f"line {number}: {wrong}")

    def count(self) -> int:
        """Parses nothing."""
        return sum(1 for _ in self._lines())

    def write_kept(self, keep: Callable[[int], bool], destination: Path) -> None:
        """The lines as they are, in UTF-8 and the compression of the file."""
        with (
            atomic_path(destination) as temporary,
            write_compressed(temporary, compression(self.path)) as out,
        ):
            for row, (_, line, error) in enumerate(self._lines()):
                if not error and keep(row):
                    out.write(line if line.endswith(b"\n") else line + b"\n")

    def _lines(self) -> Iterator[tuple[int, bytes, str]]:
        """1-based number and bytes of every line that is not blank, and at the end the damage."""
        with read_utf8(self.path) as stream:
            number = 0
            for number, line in enumerate(stream, start=1):
                if not line.endswith(b"\n") and stream.damage and not _is_json(line):
                    break
                if not line.isspace():
                    yield number, line, ""
            else:
                number += 1
            if stream.damage:
                yield number, b"", f"line {number}: {stream.damage}"


@dataclass(frozen=True)
class JsonSource(FileSource):
    """An array of records, one record alone, or several one after another."""

    def records(self) -> Iterator[Record]:
        """Every element, and what lies between the readable ones with its place."""
        for row, element in enumerate(self._elements()):
            yield Record(row, element.value, element.error)

    def count(self) -> int:
        """Parses everything: nothing else tells where an element ends."""
        return sum(1 for _ in self._elements())

    def write_kept(self, keep: Callable[[int], bool], destination: Path) -> None:
        """The elements in their wording, as an array if they came in one; in the file's compression."""
        kept = (
            element.text.encode("utf-8", "surrogateescape")
            for row, element in enumerate(self._elements())
            if not element.error and keep(row)
        )
        before, between, after = (
            (b"[\n", b",\n", b"\n]\n") if self._is_array() else (b"", b"\n", b"\n")
        )
        with (
            atomic_path(destination) as temporary,
            write_compressed(temporary, compression(self.path)) as out,
        ):
            out.write(before)
            for i, text in enumerate(kept):
                out.write(between + text if i else text)
            out.write(after)

    def _elements(self) -> Iterator[Element]:
        with read_utf8(self.path) as stream:
            yield from read_values(stream)

    def _is_array(self) -> bool:
        with read_utf8(self.path) as stream:
            return stream.read(CHUNK).lstrip().startswith(b"[")


def parse_line(line: bytes) -> Any:
    """The JSON value of a line.

    Raises:
        ValueError, RecursionError: it has none.
    """
    # json.loads(line) would guess at UTF-16. Halves of surrogate pairs are left to whoever reads it.
    text = line.decode("utf-8", "surrogatepass")
    return json.loads(text.removeprefix("\ufeff"))  # where files were put one behind another


def _is_json(line: bytes) -> bool:
    try:
        parse_line(line)
    except (ValueError, RecursionError):
        return False
    return True
