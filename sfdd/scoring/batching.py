"""Conversations of like length together, so that almost nothing is padding."""

from collections.abc import Iterable, Iterator, Sequence

from sfdd.conversations.conversation import TokenizedConversation
from sfdd.errors import DataError

# How far ahead conversations are collected to find others of like length. Bounds the memory, too.
_WINDOW_CONVERSATIONS = 2048
_WINDOW_TOKENS = 2**20


def windows(
    conversations: Iterable[TokenizedConversation],
) -> Iterator[list[TokenizedConversation]]:
    """Consecutive conversations, up to a number of them and of tokens."""
    window: list[TokenizedConversation] = []
    tokens = 0
    try:
        for conversation in conversations:
            window.append(conversation)
            tokens += len(conversation)
            if len(window) >= _WINDOW_CONVERSATIONS or tokens >= _WINDOW_TOKENS:
                yield window
                window, tokens = [], 0
    except DataError:
        yield window  # what could be read of damaged data is scored before the run ends
        raise
    if window:
        yield window


def batches(
    window: Sequence[TokenizedConversation], batch_tokens: int
) -> Iterator[list[TokenizedConversation]]:
    """Longest first; a batch's width times its rows stays within `batch_tokens`.

    A conversation longer than that is a batch of its own.
    """
    batch: list[TokenizedConversation] = []
    for conversation in sorted(window, key=len, reverse=True):
        if batch and len(batch[0]) * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(conversation)
    if batch:
        yield batch
