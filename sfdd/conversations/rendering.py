"""From a conversation to token ids and the loss mask: which tokens the target would generate.

One text holds every answer as the target would give it if, for each, the text begins with the prompt
that the target would be given, character by character and token by token. Where it does not (templates
of reasoning models change earlier turns; a prompt's last token may merge with an answer's first), each
answer becomes a sample of its own. A token is supervised if it starts inside an answer.
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


_BLANKS = "a  b \n c"
_PROMPTS_BEYOND = 3  # the maximum length, one after another


@dataclass(frozen=True)
class _Tokens:
    """A tokenized text, cut at the maximum length; every array is [T]."""

    text: str
    ids: TokenArray
    starts: np.ndarray  # first character of each token, blanks before a word not counted
    ends: np.ndarray  # one behind its last character
    truncated: bool

    @property
    def end(self) -> int:
        """How far the tokens reach in the text."""
        return int(self.ends[-1]) if len(self.ends) else 0


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
        config: MaskConfig = MaskConfig(),
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
        # Some tokenizers leave blanks out of the offsets: where a token ends is then not certain.
        offsets = self._encode(_BLANKS)[1]
        self._trims_offsets = sum(end - begin for begin, end in offsets) < len(_BLANKS)

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
                num_turns=conversation.roles.count("assistant"),
                truncated=any(s.truncated for s in samples),
                rewritten=rewritten,
                part=part,
                parts=len(kept),
            )
            for part, sample in enumerate(kept)
        ]

    def _samples(self, conversation: Conversation) -> tuple[list[_Sample], bool]:
        """The conversation in as few samples as hold every answer, and whether history is rewritten."""
        tools = conversation.tools
        messages = self._template.adapt(
            conversation.messages, self._config.reasoning, has_tools=bool(tools)
        )
        if self._config.reasoning == "drop" and not any(map(_says_something, messages)):
            raise SkipRecordError(SkipReason.EMPTY, "nothing is left without the reasoning")
        turns = [
            i
            for i, message in enumerate(messages)
            if message["role"] == "assistant" and i not in conversation.muted
        ]
        if not turns:
            raise SkipRecordError(
                SkipReason.NO_SUPERVISED_TOKENS, "every assistant turn has weight 0"
            )
        if self._config.last_turn_only:
            turns = turns[-1:]
        if len(turns) > 1 and (whole := self._one_sample(messages, turns, tools)):
            return [whole[0]], whole[1]
        rewritten = len(turns) > 1
        if rewritten and self._config.rewritten == "last":
            turns = turns[-1:]
        samples, unprompted, beyond = [], False, 0
        for turn in turns:
            answer = self._answer(messages, turn, tools)
            samples.append(self._own_sample(answer))
            unprompted |= answer.prompt_end is None
            # Prompts grow; those of a long conversation need not all be rendered to be cut off.
            beyond = beyond + 1 if samples[-1].truncated and not samples[-1].loss_mask.any() else 0
            if beyond == _PROMPTS_BEYOND:
                break
        return samples, rewritten or unprompted

    def _one_sample(
        self, messages: Sequence[Message], turns: Sequence[int], tools: Sequence[Message]
    ) -> tuple[_Sample, bool] | None:
        """One text with all the answers, or None where an answer would not stand as it was given.

        Also whether a prompt differs from what the template writes before its answer.
        """
        tokens = self._tokenize(self._template.render(messages[: turns[-1] + 1], tools))
        answers = []
        for turn in turns:
            answer = self._answer(messages, turn, tools)
            if not tokens.text.startswith(answer.text[: answer.end]):
                return None
            if tokens.truncated and answer.begin >= tokens.end:
                break
            if not self._ends_with_a_token(tokens, answer.prompt_end):
                return None
            answers.append(answer)
        unprompted = any(answer.prompt_end is None for answer in answers)
        return _Sample(tokens.ids, self._mask(tokens, answers), tokens.truncated), unprompted

    def _own_sample(self, answer: Answer) -> _Sample:
        """An answer after its prompt, the two tokenized apart where a token would join them."""
        tokens = self._tokenize(answer.text)
        if not self._ends_with_a_token(tokens, answer.prompt_end):
            apart = self._tokenize(answer.text, answer.prompt_end)
            # Some tokenizers put a blank before every text they are given: then this is no way.
            if self._tokenizer.decode(apart.ids) == self._tokenizer.decode(tokens.ids):
                tokens = apart
        return _Sample(tokens.ids, self._mask(tokens, [answer]), tokens.truncated)

    def _answer(self, messages: Sequence[Message], turn: int, tools: Sequence[Message]) -> Answer:
        return find_answer(self._template, messages, turn, tools, self._config.reasoning)

    def _tokenize(self, text: str, border: int | None = None) -> _Tokens:
        """The tokens of a text, or of the two parts of it on either side of a border."""
        ids, offsets = self._encode(text[:border])
        if border is not None:
            more_ids, more = self._encode(text[border:])
            ids = ids + more_ids
            offsets = offsets + [(begin + border, end + border) for begin, end in more]
        truncated = len(ids) > self._max_length
        offsets = offsets[: self._max_length]
        return _Tokens(
            text=text,
            ids=np.asarray(ids[: self._max_length], dtype=np.int32),
            starts=_token_starts(text, offsets),
            ends=np.asarray([end for _, end in offsets], dtype=np.int64),
            truncated=truncated,
        )

    def _encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        # The template writes the special tokens; adding more would make a second BOS.
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return encoded["input_ids"], encoded["offset_mapping"]

    def _ends_with_a_token(self, tokens: _Tokens, prompt_end: int | None) -> bool:
        """Whether the tokens of the prompt are the first tokens of the text."""
        if prompt_end is None or prompt_end > tokens.end:
            return True
        if not self._trims_offsets and (tokens.ends == prompt_end).any():
            return True
        prompt = self._encode(tokens.text[:prompt_end])[0]
        return prompt == tokens.ids[: len(prompt)].tolist()

    def _mask(self, tokens: _Tokens, answers: Sequence[Answer]) -> MaskArray:
        """True for tokens that start inside an answer, and for its end-of-turn token. [T]"""
        special = np.isin(tokens.ids, self._special_ids)  # [T]
        mask = np.zeros(len(tokens.ids), dtype=np.bool_)
        for answer in answers:
            for begin, end in answer.spans:
                mask |= (tokens.starts >= begin) & (tokens.starts < end)
            if answer.ends_turn:
                mask[self._end_of_turn(tokens, special, answer)] = True
        mask[:1] = False  # nothing predicts the first token
        return mask

    def _end_of_turn(self, tokens: _Tokens, special: np.ndarray, answer: Answer) -> np.ndarray:
        """The special token that the template writes behind an answer, in its turn.

        Of several in a row, all up to the tokenizer's own end of sequence: Command-R ends the response
        and then the turn.
        """
        turn_end = common_prefix(tokens.text, answer.text)
        found = np.flatnonzero(special & (tokens.ends > answer.end) & (tokens.ends <= turn_end))
        row = found[: 1 + int((np.diff(found) == 1).cumprod().sum())]
        last = np.flatnonzero(tokens.ids[row] == self._tokenizer.eos_token_id)
        return row[: last[0] + 1] if len(last) else row[:1]

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


def _says_something(message: Message) -> bool:
    said = (message.get("content") or "").strip() or message.get("tool_calls")
    return message["role"] == "assistant" and bool(said)


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
