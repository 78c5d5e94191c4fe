"""Finding one record in data sets of any size: read up to it, and no further."""

from collections.abc import Sequence

from sfdd.conversations.conversation import Conversation, Skipped
from sfdd.conversations.pipeline import read_conversations
from sfdd.conversations.records import Source
from sfdd.errors import DataError, UsageError


def find_record(
    sources: Sequence[Source], row: int | None, id: str | None, format: str | None
) -> Conversation | Skipped:
    """The record at a row, of an id, or the first.

    Raises:
        DataError: there is none.
        UsageError: a row of several data sets is no one record.
    """
    if row is not None and len(sources) > 1:
        raise UsageError(
            f"--row {row} could be in any of {len(sources)} data sets. Name one of them, or give --id."
        )
    read = 0
    for item in read_conversations(sources, format):
        if id is None and item.origin.row == (row or 0):
            return item
        if id is not None and id in (item.id, str(item.origin)):
            return item
        read += 1
    names = ", ".join(source.name for source in sources)
    if id is not None:
        raise DataError(
            f"None of the {read:,} records of {names} has the id {id!r}. The column 'id' of a score "
            "table holds the ids; --row takes a position."
        )
    raise DataError(
        f"{names} has no row {row or 0}: it has {read:,} records, and the first is row 0."
    )
