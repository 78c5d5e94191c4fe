"""From a conversation to token ids and the loss mask: which tokens the target would generate.

The rendered text is tokenized once; a token is supervised if it starts inside an answer. Where the
chat template changes earlier turns once the conversation goes on (reasoning models do), one text cannot
hold every answer as the target would give it: each becomes a sample of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sfdd.conversations.answers import Answer, common_prefix, find_answer
from sfdd.conversations.config import MaskConfig
from sfdd.conversations.conversation import (
    Conversation,
    MaskArray,
    Skipped,
    SkipReason,
    TokenArray,
    TokenizedConversation,
)
from sfdd.conversations.messages import SkipRecordError
from sfdd.conversations.template import ChatTemplate, Message
from sfdd.errors import TargetError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class _Sample:
    input_ids: TokenArray  # [T]
    loss_mask: MaskArray  # [T]
    truncated: bool


class ChatRenderer:
    """The target's tokenizer and template, and the choice of what is supervised."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        max_length: int,
        config: MaskConfig = MaskConfig(),  # noqa: B008 - frozen
    ) -> None:
        if not tokenizer.is_fast:
            raise TargetError(
                f"The target's tokenizer ({type(tokenizer).__name__}) does not say where in the text its "
                "tokens stand, so answers cannot be told from prompts. Give it a tokenizer.json."
            )
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._config = config
        self._template = ChatTemplate(tokenizer)
        added = tokenizer.added_tokens_decoder.items()
        special = (i for i, token in added if token.special)
        self._special_ids = [*tokenizer.all_special_ids, *special]

    def render(self, conversation: Conversation) -> list[TokenizedConversation] | Skipped:
        """Token ids and loss mask, cut at the maximum length; or why there are none.

        Several samples come of a conversation whose history the template rewrites, unless the
        configuration says to take its last turn alone.
        """
        try:
            if conversation.tokens:
                samples, rewritten = [self._ready_made(*conversation.tokens)], False
            else:
                samples, rewritten = self._samples(conversation)
            kept = [sample for sample in samples if sample.loss_mask.any()]
            if not kept:
                at = f"within {self._max_length} tokens" if samples[0].truncated else ""
                raise SkipRecordError(SkipReason.NO_SUPERVISED_TOKENS, at)
        except SkipRecordError as skip:
            return Skipped(
                conversation.origin, conversation.id, str(skip), conversation.content_hash
            )
        return [
            TokenizedConversation(
                origin=conversation.origin,
                id=conversation.id,
                input_ids=sample.input_ids,
                loss_mask=sample.loss_mask,
                content_hash=conversation.content_hash,
                truncated=any(s.truncated for s in samples),
                rewritten=rewritten,
                part=part,
                parts=len(kept),
            )
            for part, sample in enumerate(kept)
        ]

    def _samples(self, conversation: Conversation) -> tuple[list[_Sample], bool]:
        """The conversation in as few samples as hold every answer, and whether history is rewritten."""
        messages = self._template.adapt(conversation.messages, self._config.reasoning)
        turns = [
            i
            for i, message in enumerate(messages)
            if message["role"] == "assistant" and i not in conversation.muted
        ]
        if not turns:
            raise SkipRecordError(SkipReason.NO_SUPERVISED_TOKENS, "every assistant turn has weight 0")
        if self._config.last_turn_only:
            turns = turns[-1:]
        if whole := self._one_sample(messages, turns, conversation.tools):
            sample, rewritten = whole
            return [sample], rewritten
        if self._config.rewritten == "last":
            turns = turns[-1:]
        answers = (self._answer(messages, turn, conversation.tools) for turn in turns)
        return [self._masked(answer.text, [answer]) for answer in answers], True

    def _one_sample(
        self, messages: Sequence[Message], turns: Sequence[int], tools: Sequence[Message]
    ) -> tuple[_Sample, bool] | None:
        """One text with all the answers, or None where an answer would not stand as it was given.

        Also whether a prompt differs from what the template writes before its answer.
        """
        text = self._template.render(messages[: turns[-1] + 1], tools)
        ids, starts, ends, truncated = self._tokenize(text)
        answers = []
        for turn in turns:
            answer = self._answer(messages, turn, tools)
            if not text.startswith(answer.text[: answer.end]):
                return None
            if truncated and answer.begin >= ends[-1]:
                break
            answers.append(answer)
        unprompted = not all(answer.prompted for answer in answers)
        return _Sample(ids, self._mask(text, ids, starts, answers), truncated), unprompted

    def _answer(self, messages: Sequence[Message], turn: int, tools: Sequence[Message]) -> Answer:
        return find_answer(self._template, messages, turn, tools, self._config.reasoning)

    def _masked(self, text: str, answers: Sequence[Answer]) -> _Sample:
        ids, starts, _, truncated = self._tokenize(text)
        return _Sample(ids, self._mask(text, ids, starts, answers), truncated)

    def _tokenize(self, text: str) -> tuple[TokenArray, np.ndarray, np.ndarray, bool]:
        """input_ids, first and last character of each token [T], and whether they were cut."""
        # The template writes the special tokens; adding more would make a second BOS.
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = np.asarray(encoded["input_ids"][: self._max_length], dtype=np.int32)
        offsets = encoded["offset_mapping"][: self._max_length]
        ends = np.asarray([end for _, end in offsets], dtype=np.int64)
        return ids, _token_starts(text, offsets), ends, len(encoded["input_ids"]) > len(ids)

    def _mask(
        self, text: str, ids: TokenArray, starts: np.ndarray, answers: Sequence[Answer]
    ) -> MaskArray:
        """True for tokens that start inside an answer, and for its end-of-turn token. [T]"""
        special = np.isin(ids, self._special_ids)  # [T]
        mask = np.zeros(len(ids), dtype=np.bool_)
        for answer in answers:
            for begin, end in answer.spans:
                mask |= (starts >= begin) & (starts < end)
            if answer.ends_turn:
                # The first special token that the template writes after the answer, in its turn.
                turn_end = common_prefix(text, answer.text)
                mask[np.flatnonzero(special & (starts >= answer.end) & (starts < turn_end))[:1]] = (
                    True
                )
        mask[:1] = False  # nothing predicts the first token
        return mask

    def _ready_made(self, input_ids: list[int], loss_mask: list[int]) -> _Sample:
        """A record that came as tokens: checked, and cut."""
        if len(input_ids) != len(loss_mask):
            raise SkipRecordError(
                SkipReason.INVALID_TOKENS,
                f"{len(input_ids)} input_ids but {len(loss_mask)} values in loss_mask",
            )
        vocabulary = len(self._tokenizer)
        if wrong := next((i for i in input_ids if not 0 <= i < vocabulary), None):
            raise SkipRecordError(
                SkipReason.INVALID_TOKENS, f"token {wrong} of a vocabulary of {vocabulary}"
            )
        if wrong := next((value for value in loss_mask if value not in (0, 1)), None):
            raise SkipRecordError(SkipReason.INVALID_TOKENS, f"{wrong} in loss_mask, not 0 or 1")
        ids = np.asarray(input_ids[: self._max_length], dtype=np.int32)
        mask = np.asarray(loss_mask[: self._max_length], dtype=np.bool_)
        mask[:1] = False
        return _Sample(ids, mask, len(input_ids) > len(ids))


def _token_starts(text: str, offsets: Sequence[tuple[int, int]]) -> np.ndarray:
    """Where each token starts in the text, the blanks before a word not counted. [T]

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
