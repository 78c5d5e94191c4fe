"""Rendering by the target's chat template, and the loss mask: which tokens the target would generate.

The mask is found in the rendered text, turn by turn, by what the template does and not by what the text
says: the conversation through an assistant turn is rendered twice, once with other content in that turn,
and where the two texts part and meet again the content begins and ends. No text is searched for, so a
user who quotes the assistant, or an answer that repeats, cannot move the mask. The text is tokenized
once; a token belongs to the content if it starts in it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sfdd.conversations.conversation import (
    Conversation,
    MaskArray,
    Skipped,
    SkipReason,
    TokenArray,
    TokenizedConversation,
)
from sfdd.conversations.formats import SkipRecordError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Llama 3 templates write a date into every prompt, today's unless told: scores would change overnight.
# This is the date they fall back to themselves.
_TEMPLATE_ARGUMENTS = {"date_string": "26 Jul 2024"}

# Stand in for the content of a turn; one of them differs from it at both ends.
_STAND_INS = ("\u2042", "\u203b", "\u2318")


class ChatRenderer:
    """The target's tokenizer and template, called as its users call them."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", max_length: int) -> None:
        self._tokenizer = tokenizer
        self._max_length = max_length
        added = tokenizer.added_tokens_decoder.items()
        special = (i for i, token in added if token.special)
        self._special_ids = [*tokenizer.all_special_ids, *special]

    def render(self, conversation: Conversation) -> TokenizedConversation | Skipped:
        """Token ids and loss mask, cut at the maximum length; or why there are none."""
        try:
            ids, mask, truncated = self._tokenize(conversation.messages)
            if not mask.any():
                at = f"within {self._max_length} tokens" if truncated else ""
                raise SkipRecordError(SkipReason.NO_SUPERVISED_TOKENS, at)
        except SkipRecordError as skip:
            return Skipped(
                conversation.origin, conversation.id, str(skip), conversation.content_hash
            )
        return TokenizedConversation(
            origin=conversation.origin,
            id=conversation.id,
            input_ids=ids,
            loss_mask=mask,
            content_hash=conversation.content_hash,
            truncated=truncated,
        )

    def _tokenize(self, messages: Sequence[dict[str, Any]]) -> tuple[TokenArray, MaskArray, bool]:
        """input_ids [T] and loss mask [T] up to the last assistant turn, and whether they were cut."""
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        text = self._template(messages[: answers[-1] + 1])
        # The template writes the special tokens; adding more would make a second BOS.
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = np.asarray(encoded["input_ids"][: self._max_length], dtype=np.int32)
        offsets = encoded["offset_mapping"][: self._max_length]
        truncated = len(encoded["input_ids"]) > len(ids)

        starts = _token_starts(text, offsets)  # [T]
        ends = np.asarray([end for _, end in offsets])  # [T]
        special = np.isin(ids, self._special_ids)  # [T]
        mask = np.zeros(len(ids), dtype=np.bool_)
        for i in answers:
            begin, end, turn_end = self._content(messages, i, text)
            if truncated and begin >= ends[-1]:
                break
            mask |= (starts >= begin) & (starts < end)
            # The end-of-turn token: the first special one that the template writes after the content.
            mask[np.flatnonzero(special & (starts >= end) & (ends <= turn_end))[:1]] = True
        mask[:1] = False  # nothing predicts the first token
        return ids, mask, truncated

    def _content(
        self, messages: Sequence[dict[str, Any]], turn: int, text: str
    ) -> tuple[int, int, int]:
        """Where in the whole text an answer's content begins and ends, and where its turn ends."""
        before = self._template(messages[:turn], add_generation_prompt=True)
        through = self._template(messages[: turn + 1])
        content = messages[turn]["content"]
        stand_in = next(c for c in _STAND_INS if c not in content[:1] + content[-1:])
        other = self._template([*messages[:turn], {**messages[turn], "content": stand_in}])
        begin = _common_prefix(through, other)
        end = len(through) - _common_prefix(through[begin:][::-1], other[begin:][::-1])
        if not text.startswith(through[:end]):
            raise SkipRecordError(
                SkipReason.TEMPLATE_REWRITES_HISTORY,
                f"the template renders turn {turn + 1} differently once the conversation goes on",
            )
        if not text.startswith(before):
            raise SkipRecordError(
                SkipReason.TEMPLATE_REWRITES_HISTORY,
                f"the prompt for turn {turn + 1} is not what the template writes before its answer",
            )
        return max(begin, len(before)), end, _common_prefix(text, through)

    def _template(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = False
    ) -> str:
        if not messages:
            raise SkipRecordError(SkipReason.ASSISTANT_FIRST)
        try:
            return self._tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **_TEMPLATE_ARGUMENTS,
            )
        except Exception as error:  # whatever a template raises concerns this record alone
            raise SkipRecordError(SkipReason.TEMPLATE_ERROR, str(error)) from error


def _common_prefix(left: str, right: str) -> int:
    """How many characters two texts share at the start; bisected, since slices compare fast."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left[:middle] == right[:middle] else (low, middle - 1)
    return low


def _token_starts(text: str, offsets: Sequence[tuple[int, int]]) -> np.ndarray:
    """Where each token starts in the text, the blanks before a word not counted.

    Byte-level and SentencePiece tokenizers join a blank to the word behind it. A prompt that ends in a
    blank would otherwise claim the answer's first word. A token of blanks alone starts where the one
    before it ends.
    """
    starts, previous_end = [], 0
    for begin, end in offsets:
        while begin < end and text[begin] == " ":
            begin += 1
        starts.append(begin if begin < end else previous_end)
        previous_end = max(previous_end, end)
    return np.asarray(starts, dtype=np.int64)
