"""A data set as a row of records, whatever it is kept in."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


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
        """Its whole path, or its hub id: the same however and wherever the user wrote it."""

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
