"""Reading a data set for the target: every record comes out tokenized, or skipped with a reason."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from sfdd.artifacts import digest_json
from sfdd.conversations.conversation import (
    Conversation,
    Origin,
    Skipped,
    SkipReason,
    TokenizedConversation,
)
from sfdd.conversations.formats import SkipRecordError, read_messages, record_id
from sfdd.conversations.records import Source
from sfdd.conversations.rendering import ChatRenderer
from sfdd.conversations.sources import open_source
from sfdd.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def open_sources(names: Sequence[str]) -> list[Source]:
    """Open every data set before reading any, so that a mistyped name is noticed at once.

    Raises:
        DataError: one cannot be opened, or is given twice.
    """
    sources = [open_source(name) for name in names]
    for i, source in enumerate(sources):
        if source.name in (earlier.name for earlier in sources[:i]):
            raise DataError(f"Data set {source.name} is given twice. Name every data set once.")
    return sources


def read_conversations(sources: Sequence[Source]) -> Iterator[Conversation | Skipped]:
    """Every record of some data sets, in order.

    A record is known by its own id where that is unique, else by its source and row.
    """
    seen: set[int] = set()
    for source in sources:
        for record in source.records():
            origin = Origin(source.name, record.row)
            own_id = _printable(record_id(record.value))
            unique = own_id and hash(own_id) not in seen
            seen.add(hash(own_id))
            id = own_id if unique else str(origin)
            if record.error:
                yield Skipped(origin, id, f"{SkipReason.UNREADABLE}: {record.error}")
                continue
            try:
                messages = read_messages(record.value)
            except SkipRecordError as skip:
                yield Skipped(origin, id, _printable(str(skip)), digest_json(record.value))
            else:
                yield Conversation(origin, id, messages, digest_json(messages))


def _printable(text: str) -> str:
    """With halves of surrogate pairs spelt out: neither Parquet nor a terminal takes them."""
    return text.encode("utf-8", errors="backslashreplace").decode()


def tokenize_data(
    names: Sequence[str], tokenizer: "PreTrainedTokenizerBase", max_length: int
) -> Iterator[TokenizedConversation | Skipped]:
    """The whole way: data sets by name -> tokenized conversations, in order."""
    return tokenize(open_sources(names), tokenizer, max_length)


def tokenize(
    sources: Sequence[Source], tokenizer: "PreTrainedTokenizerBase", max_length: int
) -> Iterator[TokenizedConversation | Skipped]:
    """`tokenize_data` for data sets that are open already."""
    renderer = ChatRenderer(tokenizer, max_length)
    for item in read_conversations(sources):
        yield item if isinstance(item, Skipped) else renderer.render(item)
