"""Rendering by the target's chat template, and the loss mask: which tokens the target would generate.

The mask is found by prefix rendering. For an assistant turn, the conversation up to it *with* the
generation prompt is what the target sees before it answers; the conversation through it is what stands
there afterwards. The ids in between are the answer. No text is searched for, so a user who quotes the
assistant cannot move the mask.
"""

from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from sfdd.conversations.conversation import (
    Conversation,
    Skipped,
    SkipReason,
    TokenizedConversation,
)
from sfdd.conversations.formats import SkipRecordError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ChatRenderer:
    """The target's tokenizer and template, called as its users call them."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", max_length: int) -> None:
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._special_ids = {
            *tokenizer.all_special_ids,
            *(i for i, token in tokenizer.added_tokens_decoder.items() if token.special),
        }

    def render(self, conversation: Conversation) -> TokenizedConversation | Skipped:
        """Token ids and loss mask, cut at the maximum length; or why there are none."""
        try:
            ids, mask = self._tokenize(conversation.messages)
            truncated = len(ids) > self._max_length
            ids, mask = ids[: self._max_length], mask[: self._max_length]
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
            input_ids=ids.astype(np.int32),
            loss_mask=mask,
            content_hash=conversation.content_hash,
            truncated=truncated,
        )

    def _tokenize(self, messages: tuple[dict[str, Any], ...]) -> tuple[np.ndarray, np.ndarray]:
        """input_ids [T] and loss mask [T] of the conversation up to its last assistant turn."""
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        texts = [self._template(messages[: answers[-1] + 1])]
        for i in answers:
            texts.append(self._template(messages[:i], add_generation_prompt=True))
            texts.append(self._template(messages[: i + 1]))
        # The template writes the special tokens; adding more would make a second BOS.
        whole, *parts = self._tokenizer(texts, add_special_tokens=False)["input_ids"]

        mask = np.zeros(len(whole), dtype=np.bool_)
        for turn, before, through in zip(answers, parts[::2], parts[1::2], strict=True):
            start, end = self._answer(turn + 1, whole, before, through)
            mask[max(start, 1) : end] = True
        return np.asarray(whole), mask

    def _answer(
        self, turn: int, whole: list[int], before: list[int], through: list[int]
    ) -> tuple[int, int]:
        """Where the answer of a turn starts and ends in the whole conversation."""
        start, end = len(before), _common_prefix(whole, through)
        # What follows the end of turn may merge with the next turn: only blanks may differ.
        if whole[:start] != before or self._has_text(through[end:]):
            raise SkipRecordError(
                SkipReason.TEMPLATE_REWRITES_HISTORY,
                f"the template renders turn {turn} differently once the conversation goes on",
            )
        return start, self._through_end_of_turn(whole, start, end)

    def _through_end_of_turn(self, ids: list[int], start: int, end: int) -> int:
        """Leave out the blanks a template puts after its end-of-turn token: nobody generates them."""
        last = next((i for i in range(end - 1, start - 1, -1) if ids[i] in self._special_ids), None)
        return end if last is None or self._has_text(ids[last + 1 : end]) else last + 1

    def _has_text(self, ids: list[int]) -> bool:
        return bool(ids) and bool(self._tokenizer.decode(ids).strip())

    def _template(
        self, messages: tuple[dict[str, Any], ...], add_generation_prompt: bool = False
    ) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # whatever a template raises concerns this record alone
            raise SkipRecordError(SkipReason.TEMPLATE_ERROR, str(error)) from error


def _common_prefix(left: list[int], right: list[int]) -> int:
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    )
