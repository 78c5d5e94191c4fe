"""A conversation as a trainer reads it, or why the trainer's format cannot say it.

What cannot be said is skipped, never said otherwise: a conversation without its tool calls, or with a
question put to nobody, would teach a drafter what the target never saw.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePath
from typing import Any, Protocol

from sfdd.conversations.config import MaskConfig
from sfdd.conversations.conversation import Conversation, Skipped, SkipReason, TokenizedConversation
from sfdd.conversations.rendering import ChatRenderer
from sfdd.conversations.template import inline_thought, with_reasoning_heeded
from sfdd.export.trainers import Order, TextForm


class Unsayable(StrEnum):
    """Why a conversation cannot be written in a trainer's format."""

    TOKENS_ONLY = "tokens_only"  # the record came as tokens
    TOOLS = "tools"
    REASONING = "reasoning"
    MUTED_TURNS = "muted_turns"  # answers that the record says are not to be learned
    ROLE = "role_the_trainer_does_not_know"
    ORDER = "order_of_turns"


class Converter(Protocol):
    """Turns conversations into records: of one come one or more, or a reason."""

    def __call__(self, conversation: Conversation) -> "list[Record] | Skipped":
        """The records of a conversation."""


@dataclass(frozen=True)
class Record:
    """One row of the exported file."""

    value: Mapping[str, Any]
    truncated: bool = False


@dataclass(frozen=True)
class AsText:
    """Conversations in the words of a trainer's format.

    Attributes:
        form: how the trainer reads turns.
        reasoning: as in `MaskConfig`.
        writes_reasoning: every turn has the key `reasoning_content`, since loaders want the same keys in
            all rows; without it, no conversation may have any reasoning under that key to write.
    """

    form: TextForm
    reasoning: str = "keep"
    writes_reasoning: bool = False

    def __call__(self, conversation: Conversation) -> list[Record] | Skipped:
        messages = [self._as_scored(message) for message in conversation.messages]
        if reason := self._unsayable(conversation, messages):
            return Skipped(conversation.origin, conversation.id, reason, conversation.content_hash)
        turns = [self._turn(message) for message in messages]
        return [Record({"id": portable_id(conversation), self.form.turns: turns})]

    def _as_scored(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """A turn as the chat template was given it; a thought that is kept stays where it stands."""
        inline = inline_thought(message["content"]) if message["role"] == "assistant" else ""
        return with_reasoning_heeded(dict(message), inline, self.reasoning)

    def _unsayable(
        self, conversation: Conversation, messages: Sequence[Mapping[str, Any]]
    ) -> str | None:
        roles = [message["role"] for message in messages]
        has_tools = "tool" in roles or any("tool_calls" in message for message in messages)
        if conversation.tokens:
            return Unsayable.TOKENS_ONLY
        if conversation.tools or has_tools:
            return Unsayable.TOOLS
        thinks = has_reasoning(messages) or any(map(_thinks_inline, messages))
        if thinks and not (self.form.reasoning and self.reasoning == "keep"):
            return Unsayable.REASONING
        if conversation.muted:
            return Unsayable.MUTED_TURNS
        if unknown := [role for role in roles if role not in self.form.roles]:
            return f"{Unsayable.ROLE}: {unknown[0]}"
        if not _in_order(roles, self.form.order):
            return Unsayable.ORDER
        if not any(_says_something(message) for message in messages):
            return f"{SkipReason.EMPTY}: nothing is left without the reasoning"
        return None

    def _turn(self, message: Mapping[str, Any]) -> dict[str, str]:
        turn = {
            self.form.role: self.form.roles[message["role"]],
            self.form.content: message["content"],
        }
        if self.writes_reasoning:
            turn["reasoning_content"] = message.get("reasoning_content", "")
        return turn


@dataclass(frozen=True)
class AsTokens:
    """Token ids and loss mask, as the target's tokenizer and template make them: all that sfdd reads.

    Attributes:
        renderer: the target's tokenizer, the maximum length, and what is supervised.
    """

    renderer: ChatRenderer

    def __call__(self, conversation: Conversation) -> list[Record] | Skipped:
        samples = self.renderer.render(conversation)
        if isinstance(samples, Skipped):
            return samples
        id = portable_id(conversation)
        return [Record(_tokens(id, sample), sample.truncated) for sample in samples]


def _tokens(id: str, sample: TokenizedConversation) -> dict[str, Any]:
    return {
        "id": id if sample.parts == 1 else f"{id}#{sample.part}",
        "input_ids": sample.input_ids.tolist(),
        "loss_mask": sample.loss_mask.astype("int8").tolist(),
    }


def any_reasoning(items: Iterator[Conversation | Skipped], mask: MaskConfig) -> bool:
    """Whether any of some conversations has reasoning that is kept."""
    return mask.reasoning == "keep" and any(
        isinstance(item, Conversation) and has_reasoning(item.messages) for item in items
    )


def has_reasoning(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether any of some messages has reasoning under its key."""
    return any(message.get("reasoning_content") for message in messages)


def _thinks_inline(message: Mapping[str, Any]) -> bool:
    """Whether an answer has a thought in its content; some prompts begin it, so that its end tells."""
    return message["role"] == "assistant" and "</think>" in message["content"]


def portable_id(conversation: Conversation) -> str:
    """The record's own id, or the name of its file, without folders, and its row there."""
    origin = conversation.origin
    own = conversation.id != str(origin)
    return conversation.id if own else f"{PurePath(origin.source).name}:{origin.row}"


def _in_order(roles: Sequence[str], order: Order) -> bool:
    """Whether a trainer would take the turns one after another as they are."""
    if order is Order.ANY:
        return True
    spoken = roles[1:] if roles[0] == "system" else roles
    if order is Order.ALTERNATING:
        return all(role == ("user", "assistant")[i % 2] for i, role in enumerate(spoken))
    before = ("", *spoken)
    answers_follow = all(
        before[i] == "user" for i, role in enumerate(spoken) if role == "assistant"
    )
    return answers_follow and spoken[0] == "user"


def _says_something(message: Mapping[str, Any]) -> bool:
    said = (message["content"], message.get("reasoning_content", ""))
    return message["role"] == "assistant" and any(text.strip() for text in said)
