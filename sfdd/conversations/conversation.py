"""What passes from a chat data set to the target: a conversation, then its tokens and loss mask."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np

TokenArray: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int32]]
MaskArray: TypeAlias = np.ndarray[tuple[int], np.dtype[np.bool_]]


class SkipReason(StrEnum):
    """Why a record was read but not scored. A record's `reason` is this, or this and ': detail'."""

    UNREADABLE = "unreadable"
    NOT_A_CONVERSATION = "not_a_conversation"
    UNSUPPORTED = "unsupported"
    UNKNOWN_ROLE = "unknown_role"
    EMPTY = "empty_conversation"
    NO_ASSISTANT = "no_assistant_turn"
    INVALID_TOOL = "invalid_tool"
    INVALID_TOKENS = "invalid_tokens"
    ASSISTANT_FIRST = "begins_with_assistant"
    TEMPLATE_ERROR = "template_error"
    TEMPLATE_REWRITES_HISTORY = "template_rewrites_history"
    NO_SUPERVISED_TOKENS = "no_supervised_tokens"
    NON_FINITE = "non_finite"


@dataclass(frozen=True)
class Origin:
    """Where a record stands: the source as the user named it, and its 0-based position there."""

    source: str
    row: int

    def __str__(self) -> str:
        return f"{self.source}:{self.row}"


@dataclass(frozen=True)
class Skipped:
    """A record that cannot be used, and why."""

    origin: Origin
    id: str
    reason: str
    content_hash: str = ""


@dataclass(frozen=True)
class Conversation:
    """One record as chat templates take it.

    Attributes:
        format: what the record was read as.
        messages: of `role` and `content`, and where there are any `reasoning_content`, `tool_calls`,
            `tool_call_id`, `name`; empty for a record that came as tokens.
        tools: the functions that the target may call, as JSON schemas.
        muted: positions of the assistant turns that the record says are not to be learned.
        tokens: input_ids and loss_mask of a record that came as tokens.
    """

    origin: Origin
    id: str
    messages: tuple[dict[str, Any], ...]
    content_hash: str
    format: str = ""
    tools: tuple[dict[str, Any], ...] = ()
    muted: frozenset[int] = frozenset()
    tokens: tuple[list[int], list[int]] | None = None

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(message["role"] for message in self.messages)


@dataclass(frozen=True)
class TokenizedConversation:
    """A rendered conversation; `loss_mask[t]` is True where token t is supervised.

    Supervised tokens are what the target would generate: content, reasoning and tool calls of the
    assistant turns and their end-of-turn tokens. Position 0 is never supervised, since nothing predicts
    it.

    Attributes:
        num_turns: assistant turns of the conversation; 0 for a record that came as tokens.
        truncated: it was cut at the maximum length.
        rewritten: the chat template does not leave its earlier turns as they were.
        part: which of the `parts` samples of its record this is, from 0; a conversation is one sample
            unless the template rewrites its history, then one per assistant turn.
    """

    origin: Origin
    id: str
    input_ids: TokenArray  # [T]
    loss_mask: MaskArray  # [T]
    content_hash: str = ""
    num_turns: int = 0
    truncated: bool = False
    rewritten: bool = False
    part: int = 0
    parts: int = 1

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def num_supervised_tokens(self) -> int:
        return int(self.loss_mask.sum())
