"""Reading a data set for the target: every record comes out tokenized, or skipped with a reason."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from sfdd.artifacts import digest_json
from sfdd.conversations.config import Format, MaskConfig
from sfdd.conversations.conversation import (
    Conversation,
    Origin,
    Skipped,
    SkipReason,
    TokenizedConversation,
)
from sfdd.conversations.formats import (
    Content,
    format_of,
    looks_like,
    read_content,
    record_id,
)
from sfdd.conversations.messages import SkipRecordError
from sfdd.conversations.records import Source
from sfdd.conversations.rendering import ChatRenderer
from sfdd.conversations.sources import expand_names, open_source
from sfdd.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# So many records are looked at to tell a data set of conversations from one of something else.
_RECORDS_LOOKED_AT = 100


def open_sources(names: Sequence[str], format: str | None = None) -> list[Source]:
    """Open every data set before reading any, so that a mistyped name is noticed at once.

    Args:
        names: files, patterns such as `data/*.jsonl`, saved data sets or hub ids.
        format: what the records are to be read as; None for what they are.

    Raises:
        DataError: one cannot be opened, is given twice, or holds something other than conversations.
    """
    sources = [open_source(name) for name in expand_names(names)]
    for i, source in enumerate(sources):
        if source.name in (earlier.name for earlier in sources[:i]):
            raise DataError(f"Data set {source.name} is given twice. Name every data set once.")
        if format is None:
            _refuse_other_things(source)
    return sources


def _refuse_other_things(source: Source) -> None:
    """Refuse a data set whose first records can all be read, and none is a conversation."""
    values = [r.value for r in islice(source.records(), _RECORDS_LOOKED_AT) if not r.error]
    if values and not any(format_of(value) for value in values):
        raise DataError(
            f"Data set {source.name} holds no conversations: its first record is "
            f"{looks_like(values[0])}, and sfdd reads records with messages or conversations, prompt and "
            "response or completion, instruction and output, or input_ids and loss_mask."
        )


def read_conversations(
    sources: Sequence[Source],
    format: str | None = None,
    takes: Callable[[int], bool] = lambda row: True,
) -> Iterator[Conversation | Skipped]:
    """Every record of some data sets, in order, or those of the rows that are to be taken.

    A record is known by its own id where that is unique in all of the data, else by its source and row.
    """
    wanted = Format(format) if format else None
    seen: set[int] = set()
    for source in sources:
        for record in source.records():
            origin = Origin(source.name, record.row)
            own_id = _printable(record_id(record.value))
            unique = own_id and hash(own_id) not in seen
            seen.add(hash(own_id))
            if not takes(record.row):
                continue
            id = own_id if unique else str(origin)
            if record.error:
                yield Skipped(origin, id, f"{SkipReason.UNREADABLE}: {record.error}")
                continue
            try:
                content = read_content(record.value, wanted)
                content_hash = _content_hash(content)
            except SkipRecordError as skip:
                yield Skipped(origin, id, _printable(str(skip)), _value_hash(record.value))
            except RecursionError:
                yield Skipped(origin, id, f"{SkipReason.UNREADABLE}: nested too deep")
            else:
                yield Conversation(
                    origin=origin,
                    id=id,
                    messages=content.messages,
                    content_hash=content_hash,
                    format=str(wanted or format_of(record.value)),
                    tools=content.tools,
                    muted=content.muted,
                    tokens=content.tokens,
                )


def _content_hash(content: Content) -> str:
    """The same for the same conversation, whatever format, file or id it came with."""
    more = [content.tools, sorted(content.muted), content.tokens]
    return digest_json([content.messages, *more] if any(more) else content.messages)


def _value_hash(value: Any) -> str:
    try:
        return digest_json(value)
    except RecursionError:  # json reads a little deeper than it writes
        return ""


def _printable(text: str) -> str:
    """With halves of surrogate pairs spelt out: neither Parquet nor a terminal takes them."""
    return text.encode("utf-8", errors="backslashreplace").decode()


def tokenize_data(
    names: Sequence[str],
    tokenizer: "PreTrainedTokenizerBase",
    max_length: int,
    config: MaskConfig = MaskConfig(),
) -> Iterator[TokenizedConversation | Skipped]:
    """The whole way: data sets by name -> tokenized conversations, in order."""
    return tokenize(open_sources(names, config.format), tokenizer, max_length, config)


def tokenize(
    sources: Sequence[Source],
    tokenizer: "PreTrainedTokenizerBase",
    max_length: int,
    config: MaskConfig = MaskConfig(),
) -> Iterator[TokenizedConversation | Skipped]:
    """`tokenize_data` for data sets that are open already. A record's samples follow one another."""
    renderer = ChatRenderer(tokenizer, max_length, config)
    for item in read_conversations(sources, config.format):
        rendered = item if isinstance(item, Skipped) else renderer.render(item)
        yield from [rendered] if isinstance(rendered, Skipped) else rendered
